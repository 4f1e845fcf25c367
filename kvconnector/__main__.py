"""`python -m kvconnector`: the command line where no script is installed."""

import sys

from kvconnector.cli import main

sys.exit(main())
