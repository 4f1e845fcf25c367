"""Moving bytes between workers over UCX: what it promises (`tagged_messages`), and how (`ucx`)."""

from kvconnector.transport.tagged_messages import Buffer as Buffer
from kvconnector.transport.tagged_messages import Completion as Completion
from kvconnector.transport.tagged_messages import MessageSizeError as MessageSizeError
from kvconnector.transport.tagged_messages import RegistrationError as RegistrationError
