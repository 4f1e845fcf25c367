"""The wire versions that a release speaks, and the one that two engines use. Pure.

A version covers all that two engines must read alike: messages, how a read is cut into chunks, and what a direct read
finds in the other process's memory (the lease board, the tables of its pools). It is raised only for a change that an
older release would misread: a field that is appended to a message, with a default, is no such change.

The consumer asks a directory first, in its oldest version, and states all that it speaks. The producer answers in the
newest that both speak, and names it. From then on the two engines use that one: the consumer opens its links to the
workers in it, and a worker answers on a link in the version of the link's first message.

Kinds in `codec.FIXED` are read in any version, because two engines that have none in common exchange only these.

Versions: 1, the first. 2: heartbeats name what is followed, and messages travel in batches. 3: `Progress` has a
watermark as one field, a greeting names the segments of all reads, and a read only ranges, which both sides cut into
the same chunks. 4: a read may be refused because the producer took the offer back (`Refusal.RECLAIMED`).
"""

from __future__ import annotations

from typing import NamedTuple

from kvconnector.errors import IncompatiblePeerError


class WireVersions(NamedTuple):
    """The versions from `oldest` to `newest`."""

    oldest: int
    newest: int

    def __str__(self) -> str:
        return f"{self.oldest} to {self.newest}" if self.oldest < self.newest else f"{self.newest}"

    def __contains__(self, version: object) -> bool:
        return isinstance(version, int) and self.oldest <= version <= self.newest

    def common(self, theirs: WireVersions) -> int:
        """Return the newest version that both speak.

        Raises:
            IncompatiblePeerError: There is none.
        """
        version = min(self.newest, theirs.newest)
        if version in self and version in theirs:
            return version
        raise IncompatiblePeerError(
            "the two engines have no wire version in common", ours=str(self), theirs=str(theirs)
        )

    def check(self, version: int) -> int:
        """Return `version`.

        Raises:
            IncompatiblePeerError: It is not spoken here.
        """
        if not self.oldest <= version <= self.newest:
            raise IncompatiblePeerError(
                "the peer speaks another wire version", ours=str(self), theirs=version
            )
        return version


SPOKEN = WireVersions(3, 4)
"""The versions of this release. The release that raises `newest` keeps `oldest`; the next one may raise that."""
