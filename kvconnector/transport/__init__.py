"""Moving bytes between workers over UCX: what it promises (`base`), and how (`ucx`)."""

from kvconnector.transport.base import Buffer as Buffer
from kvconnector.transport.base import Completion as Completion
from kvconnector.transport.base import MessageSizeError as MessageSizeError
from kvconnector.transport.base import RegistrationError as RegistrationError
