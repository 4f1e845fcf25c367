"""What an integration uses of an engine, as a table, and its comparison with an engine's sources. Pure.

An engine's releases change, and an exact list of known ones refuses every release that would work. So what an
integration needs is written down, one entry each: names and their parameters, names that a class gives to others,
values of enumerations, and, by a digest of its source, the code that decides where bytes lie in a cache. Everything is
read from the engine's files, without importing it: this takes a fraction of a second, and works where the engine cannot
be imported.

A known release needs no check. For another one whose entries all hold there is one warning. If an entry does not hold
the release is refused, with each difference.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import io
import re
import tokenize
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Protocol, get_args

from msgspec.structs import fields

from kvconnector.config import ENV_PREFIX, ConnectorConfig
from kvconnector.errors import ConfigError

Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
Policy = Literal["known", "checked", "any"]
POLICIES: tuple[Policy, ...] = get_args(Policy)
VARIABLE = f"{ENV_PREFIX}ENGINE_VERSIONS"
DEFAULT = next(
    field.default for field in fields(ConnectorConfig) if field.name == "engine_versions"
)
_LAYOUT_TOKENS = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


class Sources:
    """The files of a package. A place in them is `file.py:name` or `file.py:Class.method`.

    Args:
        root: The package's folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tree = functools.cache(self._tree)
        self.find = functools.cache(self._find)
        self._lines = functools.cache(self._lines_of)

    @classmethod
    def of(cls, package: str) -> Sources:
        """Return those of an installed package, which is not imported. Raises ConfigError: it is not installed."""
        spec = find_spec(package)
        folders = spec.submodule_search_locations if spec is not None else None
        if not folders:
            raise ConfigError(f"{package} is not installed here")
        return cls(Path(next(iter(folders))))

    def _find(self, place: str) -> Definition | None:
        """Return the class or function at a place, or None."""
        file, _, names = place.partition(":")
        found: ast.AST | None = self.tree(file)
        for name in names.split("."):
            inside = ast.walk(found) if found is not None else ()
            found = next(
                (each for each in inside if isinstance(each, Definition) and each.name == name),
                None,
            )
        return found if isinstance(found, Definition) else None

    def text(self, place: str) -> str:
        """Return the source of what is at a place."""
        found = self.find(place)
        return "" if found is None else self.segment(place.partition(":")[0], found)

    def segment(self, file: str, node: ast.stmt) -> str:
        """Return the source of a statement, as `ast.get_source_segment`, which splits the whole file each time."""
        lines = self._lines(file)[node.lineno - 1 : node.end_lineno]
        lines[-1] = lines[-1][: node.end_col_offset]
        lines[0] = lines[0][node.col_offset :]
        return b"\n".join(lines).decode()

    def _tree(self, file: str) -> ast.Module | None:
        try:
            return ast.parse(self._read(file))
        except (OSError, SyntaxError):
            return None

    def _lines_of(self, file: str) -> list[bytes]:
        return self._read(file).encode().split(b"\n")

    def _read(self, file: str) -> str:
        return (self.root / file).read_text("utf-8")


class Entry(Protocol):
    """Something that an integration uses."""

    def differences(self, sources: Sources) -> Iterable[str]:
        """Return in words how an engine's sources differ from it; nothing if they do not."""


@dataclass(frozen=True)
class Name:
    """A class, or a function that takes at least these parameters, in this order, `self` left out."""

    place: str
    takes: tuple[str, ...] = ()

    def differences(self, sources: Sources) -> Iterable[str]:
        """Return how it differs, as `Entry`."""
        found = sources.find(self.place)
        if found is None:
            yield f"{self.place} is missing"
        elif self.takes and (taken := parameters(found)[: len(self.takes)]) != self.takes:
            yield f"{self.place} takes {', '.join(taken)} instead of {', '.join(self.takes)}"


@dataclass(frozen=True)
class Fields:
    """Names that a class gives to its instances or members: annotated, assigned, or defined in it or in `also`."""

    place: str
    names: tuple[str, ...]
    also: tuple[str, ...] = ()

    def differences(self, sources: Sources) -> Iterable[str]:
        """Return how it differs, as `Entry`."""
        classes = [sources.find(each) for each in (self.place, *self.also)]
        if classes[0] is None:
            yield f"{self.place} is missing"
            return
        known = {name for each in classes if each is not None for name in members(each)}
        if missing := [name for name in self.names if name not in known]:
            yield f"{self.place} has no {', '.join(missing)}"


@dataclass(frozen=True)
class Mentioned:
    """Names that occur in a file, as identifiers or as text: for attributes that are made at run time."""

    file: str
    names: tuple[str, ...]

    def differences(self, sources: Sources) -> Iterable[str]:
        """Return how it differs, as `Entry`."""
        tree = sources.tree(self.file)
        if tree is None:
            yield f"{self.file} is missing"
            return
        found: set[object] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Name):
                found.add(node.id)
            elif isinstance(node, ast.Attribute):
                found.add(node.attr)
            elif isinstance(node, Definition):
                found.add(node.name)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
        if missing := [name for name in self.names if name not in found]:
            yield f"{self.file} has no {', '.join(missing)}"


@dataclass(frozen=True)
class Values:
    """Constants in a class, such as an enumeration's."""

    place: str
    values: Mapping[str, object]

    def differences(self, sources: Sources) -> Iterable[str]:
        """Return how it differs, as `Entry`."""
        found = sources.find(self.place)
        if found is None:
            yield f"{self.place} is missing"
            return
        constants = {
            target.id: node.value.value
            for node in found.body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
            for target in node.targets
            if isinstance(target, ast.Name)
        }
        for name, value in self.values.items():
            if constants.get(name) != value:
                yield f"{self.place}.{name} is {constants.get(name)!r} instead of {value!r}"


@dataclass(frozen=True)
class Unchanged:
    """Code that decides where bytes lie, with the digests of the forms that were read and compared."""

    place: str
    digests: tuple[str, ...]

    def differences(self, sources: Sources) -> Iterable[str]:
        """Return how it differs, as `Entry`."""
        found = digest(sources, self.place)
        if found not in self.digests:
            yield f"{self.place} may lay bytes out differently (digest {found or 'of nothing'})"


@dataclass(frozen=True)
class Passed:
    """Parameters that the engine passes to something of ours: those of `place` must be among ours, or ours take any."""

    place: str
    ours: Callable[[], tuple[tuple[str, ...], bool]]
    """Returns the names of our parameters, and True if there may be others."""

    def differences(self, sources: Sources) -> Iterable[str]:
        """Return how it differs, as `Entry`."""
        found = sources.find(self.place)
        names, has_any = self.ours()
        if found is None:
            yield f"{self.place} is missing"
        elif not has_any and (more := [name for name in parameters(found) if name not in names]):
            yield f"{self.place} also takes {', '.join(more)}"


@dataclass(frozen=True)
class Used:
    """Attributes that the engine uses of objects of ours, which it keeps in attributes named like `owner`."""

    files: tuple[str, ...]
    owner: str
    base: str
    """The engine's own class from which ours inherits."""
    ours: Callable[[], frozenset[str]]
    """Returns the names that our objects have."""
    unneeded: frozenset[str] = frozenset()
    """Names that it uses only in deployments that we refuse."""

    def differences(self, sources: Sources) -> Iterable[str]:
        """Return how it differs, as `Entry`."""
        missing = [file for file in self.files if sources.tree(file) is None]
        yield from (f"{file} is missing" for file in missing)
        base = sources.find(self.base)
        inherited = members(base) if base is not None else set()
        if new := sorted(self.uses(sources) - self.ours() - inherited - self.unneeded):
            yield f"the engine uses {', '.join(new)} of {self.owner}"

    def uses(self, sources: Sources) -> set[str]:
        """Return the names that the engine uses without asking whether they exist."""
        used: set[str] = set()
        asked_for: set[str] = set()
        for tree in filter(None, map(sources.tree, self.files)):
            for node in ast.walk(tree):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute):
                    if node.value.attr == self.owner:
                        used.add(node.attr)
                elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in _ASKING:
                    constants = [each for each in node.args[1:2] if isinstance(each, ast.Constant)]
                    asked_for.update(str(each.value) for each in constants)
        return used - asked_for


@dataclass(frozen=True)
class Imported:
    """All names that the files in a folder of ours import from the engine's package."""

    folder: Path
    package: str

    def differences(self, sources: Sources) -> Iterable[str]:
        """Return how it differs, as `Entry`."""
        wanted: dict[str, set[str]] = {}
        for file in sorted(self.folder.glob("*.py")):
            for node in ast.walk(ast.parse(file.read_text("utf-8"))):
                if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    package, _, module = node.module.partition(".")
                    if package == self.package:
                        wanted.setdefault(module, set()).update(each.name for each in node.names)
        for module, names in sorted(wanted.items()):
            path = module.replace(".", "/")
            tree = sources.tree(f"{path}.py") or sources.tree(f"{path}/__init__.py".lstrip("/"))
            if tree is None:
                yield f"{self.package}.{module} is missing"
                continue
            found = _names_in(tree)
            inside = (sources.root / path).is_dir()
            missing = [
                name for name in sorted(names - found) if not (inside and _has(sources, path, name))
            ]
            if missing:
                yield f"{self.package}.{module} has no {', '.join(missing)}"


def _names_in(tree: ast.Module) -> set[object]:
    """Return the names that a module defines, imports or assigns, and its constants."""
    found: set[object] = set()
    for node in ast.walk(tree):
        if isinstance(node, Definition):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found |= {node.name, node.asname or node.name}
        elif isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Constant):
            found.add(node.value)
    return found


def _has(sources: Sources, path: str, name: str) -> bool:
    folder = sources.root / path
    return (folder / f"{name}.py").exists() or (folder / name / "__init__.py").exists()


@dataclass(frozen=True)
class Implemented:
    """A base class of the engine that a class of ours implements: it must have all abstract methods, and its methods
    must take what the engine's declarations take, under the same names and in the same order, and need nothing more. An
    engine may pass any of them by its place or by its name.
    """

    place: str
    file: Path
    name: str

    def differences(self, sources: Sources) -> Iterable[str]:
        """Return how it differs, as `Entry`."""
        base, ours = (
            sources.find(self.place),
            Sources(self.file.parent).find(f"{self.file.name}:{self.name}"),
        )
        if base is None or ours is None:
            yield f"{self.place} is missing"
            return
        own = {each.name: each for each in ours.body if isinstance(each, ast.FunctionDef)}
        for method in base.body:
            if not isinstance(method, ast.FunctionDef):
                continue
            if method.name not in own:
                if any("abstract" in ast.unparse(each) for each in method.decorator_list):
                    yield f"{self.place}.{method.name} is new, and has to be implemented"
                continue
            if method.name != "__init__":
                where = f"{self.place}.{method.name}"
                yield from (f"{where} {text}" for text in _refused(method, own[method.name]))


def _refused(theirs: ast.FunctionDef, ours: ast.FunctionDef) -> Iterable[str]:
    """Return in words what calls of an engine's declaration our method would not take."""
    passed, mine = parameters(theirs), parameters(ours)
    takes_any = ours.args.vararg is not None or ours.args.kwarg is not None
    if not takes_any and (more := [name for name in passed if name not in mine]):
        yield f"takes {', '.join(more)}, too"
    if lacking := [name for name in _needed(ours) if name not in passed]:
        yield f"takes no {', '.join(lacking)}"
    common = [name for name in mine if name in passed]
    if common != (order := [name for name in passed if name in mine]):
        yield f"takes {', '.join(order)} in this order"


def _needed(found: ast.FunctionDef) -> tuple[str, ...]:
    """Return a method's parameters without a default, without `self` and `cls`."""
    arguments = found.args
    placed = len(arguments.posonlyargs) + len(arguments.args)
    defaults = [None] * (placed - len(arguments.defaults)) + arguments.defaults
    taken = zip(
        (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs),
        (*defaults, *arguments.kw_defaults),
        strict=True,
    )
    names = [each.arg for each, default in taken if default is None]
    return tuple(name for name in names if name not in {"self", "cls"})


_ASKING = {"getattr", "hasattr"}


def parameters(found: Definition) -> tuple[str, ...]:
    """Return a function's parameters without `self` and `cls`; a class's are those of its constructor."""
    if isinstance(found, ast.ClassDef):
        made = [each for each in found.body if getattr(each, "name", "") == "__init__"]
        return parameters(made[0]) if made and isinstance(made[0], ast.FunctionDef) else ()
    names = [each.arg for each in (*found.args.posonlyargs, *found.args.args)]
    names += [each.arg for each in found.args.kwonlyargs]
    return tuple(name for name in names if name not in {"self", "cls"})


def members(found: Definition) -> set[str]:
    """Return the names that a class defines, annotates or assigns, on itself and on `self`."""
    names = set()
    for node in ast.walk(found):
        if isinstance(node, Definition):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            names.add(node.attr)
    return names


def digest(sources: Sources, place: str) -> str:
    """Return a digest of what is at a place, without its comments, docstring and spacing; "" if nothing is there."""
    found = sources.find(place)
    if found is None:
        return ""
    text = sources.text(place)
    if ast.get_docstring(found, clean=False) is not None:
        first = found.body[0]
        assert isinstance(first, ast.Expr)
        segment = sources.segment(place.partition(":")[0], first)
        text = text.replace(segment, "pass" if len(found.body) == 1 else "0", 1)
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    kept = "".join(each.string for each in tokens if each.type not in _LAYOUT_TOKENS)
    return hashlib.blake2b(kept.encode(), digest_size=8).hexdigest()


def differences(entries: Iterable[Entry], sources: Sources) -> list[str]:
    """Return in words how an engine's sources differ from what an integration uses; empty if they do not."""
    return [text for entry in entries for text in entry.differences(sources)]


def release_of(version: str) -> tuple[int, ...]:
    """Return the numbers of a version's release: 0.5.23 of `0.5.23.post1+cu130`."""
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found.group().split("."))) if found else ()


def policy_of(environ: Mapping[str, str]) -> Policy:
    """Return which releases of an engine may run, by the variable `VARIABLE`.

    Raises:
        ConfigError: it has another value.
    """
    value = environ.get(VARIABLE) or DEFAULT
    for policy in POLICIES:
        if value == policy:
            return policy
    raise ConfigError(f"{VARIABLE} is one of {', '.join(POLICIES)}", engine_versions=value)


def admit(
    engine: str,
    version: str,
    *,
    known: Sequence[str],
    policy: Policy,
    find: Callable[[], Sequence[str]],
) -> str:
    """Decide whether an engine's release may run.

    Args:
        engine: The engine's name.
        version: Its version.
        known: The releases that were tested, as prefixes such as "0.32", the newest one last.
        policy: "known": no others. "checked": also those that differ in nothing that is used. "any": all.
        find: Returns the differences in words. It is called for releases that are not known.

    Returns:
        A warning for the log; "" for a known release.

    Raises:
        ConfigError: it may not.
    """
    release = release_of(version)
    if any(release[: len(each)] == each for each in map(release_of, known)):
        return ""
    if policy == "known":
        raise ConfigError(
            f"kvconnector knows only these releases of {engine}: use one of them, or a kvconnector release for yours,"
            f" or set {VARIABLE}=checked",
            found=version,
            known=tuple(known),
        )
    found = find()
    if found and policy == "checked":
        raise ConfigError(
            f"this release of {engine} differs in what kvconnector uses: use a known one, or a kvconnector"
            f" release for"
            " yours",
            found=version,
            known=tuple(known),
            differences=list(found),
        )
    text = f"{engine} {version} is newer or older than the releases that were tested (the newest is {known[-1]})"
    if found:
        return (
            f"{text}, and differs in what is used, which {VARIABLE}=any allows: {'; '.join(found)}"
        )
    return (
        f"{text}. It has everything that kvconnector uses, as `kvconnector doctor --engine` shows"
    )
