"""`python -m kvconnector.cli`: the command line where no script is installed."""

import sys

from kvconnector.cli import main

sys.exit(main())
