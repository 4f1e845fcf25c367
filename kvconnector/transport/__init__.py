"""Moving bytes between workers: one contract (`base`), and UCX (`ucx`), which fulfils it."""

from kvconnector.transport.base import Buffer as Buffer
from kvconnector.transport.base import Completion as Completion
from kvconnector.transport.base import MessageSizeError as MessageSizeError
from kvconnector.transport.base import RegistrationError as RegistrationError
