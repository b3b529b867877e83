"""The picture of docs/architecture.md: packages as boxes in their layers, an arrow where an import goes.

    python benchmarks/picture.py            draws docs/images/architecture.svg
    python benchmarks/picture.py --check    says whether the picture is still that of today's imports

An arrow that follows from two others is left out (transitive reduction). Imports inside of functions count, those for
type checkers don't.
"""

from __future__ import annotations

import ast
import itertools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path

from structure import code_lines, stub_lines, stub_text

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "accelerate"
PLAN = ROOT / "docs" / "architecture.md"
TARGET = ROOT / "docs" / "images" / "architecture.svg"

#: Layers that are one box: a box for each of their small modules would say nothing.
JOINED = {0: "foundation", 7: "public addresses"}
#: What stands beside the layers -> the layer it is drawn in.
BESIDE = {"commands": 5, "launch": 4}
#: Users of the package, which come in by the front door.
LEFT_OUT = "test_utils/scripts/"
TOLERANCE = 0.2  # a box says how large a package is, not what the last commit added

Graph = dict[str, set[str]]

# ------------------------------------------------------------------------------------------------- what is there


def layers() -> dict[int, tuple[str, list[str]]]:
    """Return by number the title and the packages of each layer in the plan of record."""
    rows = re.findall(r"^\| (\d) ([^|]*) \| ([^|]*) \|$", PLAN.read_text(encoding="utf-8"), re.MULTILINE)
    return {int(number): (title, re.findall(r"`(\w+)`", names)) for number, title, names in rows}


def imported(tree: ast.AST, package: Sequence[str]) -> Iterator[str]:
    """Yield the dotted modules of this package that a file in ``package`` imports."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[2] for alias in node.names if alias.name.startswith("accelerate."))
        elif isinstance(node, ast.ImportFrom) and (node.level or str(node.module).split(".")[0] == "accelerate"):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            module = (str(node.module) if node.level else str(node.module).partition(".")[2]) if node.module else ""
            yield from (".".join(filter(None, [*base, module, alias.name])) for alias in node.names)
        else:
            yield from imported(node, package)


def read(boxes: Mapping[str, str]) -> tuple[Graph, dict[str, int]]:
    """Return the imports between boxes and the code lines of each; ``boxes`` is the box of each package."""
    edges: Graph = {box: set() for box in boxes.values()}
    sizes = dict.fromkeys(edges, 0)
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        if len(parts) == 1 and parts[0] == "__init__":
            parts = ("accelerate",)
        text = path.read_text(encoding="utf-8")
        tree, box = ast.parse(text), boxes[parts[0]]
        sizes[box] += len(code_lines(text, tree)) + stub_lines(path)
        if not path.relative_to(PACKAGE).as_posix().startswith(LEFT_OUT):
            trees = tree, ast.parse(stub_text(path))
            names = {module.split(".")[0] for tree in trees for module in imported(tree, parts[:-1])}
            # The architecture test lists what of the core still imports a guest; an arrow for it would close a circle.
            unseen = {box} if box == JOINED[7] else {box, "guests"}
            edges[box] |= {boxes[name] for name in names if name in boxes} - unseen
    return edges, sizes


def reduced(edges: Graph) -> Graph:
    """Return the fewest arrows from which the same boxes are reached."""
    reached: Graph = {}

    def reach(box: str) -> set[str]:
        if box not in reached:
            reached[box] = edges[box].union(*map(reach, sorted(edges[box])))
        return reached[box]

    return {box: {one for one in near if not any(one in reach(other) for other in near)} for box, near in edges.items()}


def rows_of(edges: Graph, layer_of: Mapping[str, int]) -> dict[str, int]:
    """Return the row of each box, from the top: above all that it imports, and below the layers above its own."""
    row: dict[str, int] = {}
    bottom = 0
    for layer in sorted(set(layer_of.values())):
        inside = sorted(box for box in layer_of if layer_of[box] == layer)

        def height(box: str, inside: Sequence[str] = inside) -> int:
            return max((height(other) + 1 for other in edges[box].intersection(inside)), default=0)

        row |= {box: bottom - height(box) for box in inside}
        bottom = min(row.values()) - 1
    return {box: number - min(row.values()) for box, number in row.items()}


# ------------------------------------------------------------------------------------------------------ where to

WIDTH, LEFT, BOX, STEP, TITLE = 460.0, 10.0, 36.0, 58.0, 20.0
GAP, LANE = 9.0, 4.0  # between boxes; the width of an arrow that passes a row

Place = tuple[str, ...]  # (box,), or (from, to, row) where an arrow passes a row


def width_of(place: Place) -> float:
    return 7.5 * len(place[0]) + 14 if len(place) == 1 else LANE


def chains(edges: Graph, row: Mapping[str, int]) -> list[list[Place]]:
    """Return each arrow as the places it goes through, one in each row."""
    found: list[list[Place]] = []
    for source in sorted(edges):
        for target in sorted(edges[source]):
            passed = [(source, target, str(number)) for number in range(row[source] + 1, row[target])]
            found.append([(source,), *passed, (target,)])
    return found


def arranged(edges: Graph, row: Mapping[str, int]) -> tuple[dict[Place, float], list[list[Place]]]:
    """Return the middle of each place from the left, so that arrows are short, and the arrows."""
    ways = chains(edges, row)
    levels: dict[int, list[Place]] = {number: [] for number in range(max(row.values()) + 1)}
    for box in sorted(row):
        levels[row[box]].append((box,))
    near: dict[Place, list[Place]] = {}
    for way in ways:
        for place in way[1:-1]:
            levels[int(place[2])].append(place)
        for above, below in itertools.pairwise(way):
            near.setdefault(above, []).append(below)
            near.setdefault(below, []).append(above)
    x = {
        place: WIDTH * (index + 1) / (len(level) + 1) for level in levels.values() for index, place in enumerate(level)
    }
    for _ in range(60):
        for level in [*levels.values(), *reversed(levels.values())]:
            wish = {place: mean([x[other] for other in near.get(place, [place])]) for place in level}
            level.sort(key=lambda place: (wish[place], place))
            x |= spread(level, wish)
    return x, ways


def mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def spread(level: Sequence[Place], wish: Mapping[Place, float]) -> dict[Place, float]:
    """Return places near their wishes, in order, that don't overlap and stay inside of the picture."""
    mirrored = {place: WIDTH - x for place, x in wish.items()}
    right, left = pushed(level, wish), pushed(level[::-1], mirrored)
    return {place: (right[place] + WIDTH - left[place]) / 2 for place in level}


def pushed(level: Sequence[Place], wish: Mapping[Place, float]) -> dict[Place, float]:
    """Return the places moved to the right as far as the ones before need, and back inside."""
    found: dict[Place, float] = {}
    end = LEFT
    for place in level:
        found[place] = max(wish[place], end + width_of(place) / 2)
        end = found[place] + width_of(place) / 2 + GAP
    end = WIDTH - LEFT
    for place in reversed(level):
        found[place] = min(found[place], end - width_of(place) / 2)
        end = found[place] - width_of(place) / 2 - GAP
    return found


# ------------------------------------------------------------------------------------------------------- drawing

STYLE = (
    "text{font-family:system-ui,sans-serif;fill:#1f2328}.card{fill:#fff}.band{fill:#f3f4f6}"
    ".title{font-size:11px;fill-opacity:.75;paint-order:stroke;stroke:#f3f4f6;stroke-width:4px}"
    ".box{fill:#fff;stroke:#3f7cac;stroke-width:1.3}.beside{stroke-dasharray:4 3}"
    ".name{font-size:12.5px;font-weight:600;text-anchor:middle}.size{font-size:10px;text-anchor:middle;opacity:.75}"
    ".way{fill:none;stroke:#6e7781;stroke-width:1.1}.tip{fill:#6e7781}"
    "@media (prefers-color-scheme:dark){text{fill:#e6edf3}.card{fill:#0d1117}.band{fill:#1b212a}"
    ".title{stroke:#1b212a}.box{fill:#0d1117;stroke:#6cb0e0}.way{stroke:#9198a1}.tip{fill:#9198a1}}"
)


def drawn(edges: Graph, sizes: Mapping[str, int], layer_of: Mapping[str, int], titles: Mapping[int, str]) -> str:
    """Return the picture as SVG."""
    row = rows_of(edges, layer_of)
    x, ways = arranged(edges, row)
    order = sorted(set(layer_of.values()), reverse=True)
    top, band, y = {}, {}, 4.0
    for layer in order:
        numbers = sorted({row[box] for box in row if layer_of[box] == layer})
        band[layer] = (y, TITLE + STEP * (len(numbers) - 1) + BOX + 8)
        for index, number in enumerate(numbers):
            top[number] = y + TITLE + STEP * index
        y += band[layer][1] + 24
    parts = [f"<rect class='card' width='{WIDTH:g}' height='{y - 20:g}' rx='8'/>"]
    for layer in order:
        start, height = band[layer]
        parts.append(f"<rect class='band' x='3' y='{start:g}' width='{WIDTH - 6:g}' height='{height:g}' rx='6'/>")
    parts += [path(way, x, row, top) for way in ways]
    for layer in order:
        parts.append(f"<text class='title' x='10' y='{band[layer][0] + 14:g}'>{layer}  {escape(titles[layer])}</text>")
    parts += [box_at(box, x[box,], top[row[box]], sizes[box]) for box in sorted(row)]
    return (
        f"<svg viewBox='0 0 {WIDTH:g} {y - 20:g}' width='640' xmlns='http://www.w3.org/2000/svg' role='img' "
        "aria-label='The packages in their layers; an arrow goes from a package to one that it imports'>"
        f"<style>{STYLE}</style><defs><marker id='tip' viewBox='0 0 8 8' refX='7' refY='4' markerWidth='6' "
        "markerHeight='6' orient='auto'><path class='tip' d='M0 0 8 4 0 8z'/></marker></defs>\n"
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def box_at(box: str, x: float, y: float, size: int) -> str:
    wide = width_of((box,))
    kind = "box beside" if box in BESIDE else "box"
    return (
        f"<rect class='{kind}' x='{x - wide / 2:.0f}' y='{y:g}' width='{wide:.0f}' height='{BOX:g}' rx='5'/>"
        f"<text class='name' x='{x:.0f}' y='{y + 16:g}'>{escape(box)}</text>"
        f"<text class='size' x='{x:.0f}' y='{y + 29:g}'>{rounded(size):,}</text>"
    )


def path(way: Sequence[Place], x: Mapping[Place, float], row: Mapping[str, int], top: Mapping[int, float]) -> str:
    """Return an arrow: straight down past the rows on its way, in curves between them."""
    level = row[way[0][0]]
    at, y = x[way[0]], top[level] + BOX
    words = f"M{at:.0f} {y:g}"
    for place in way[1:]:
        level += 1
        middle = (y + top[level]) / 2
        words += f"C{at:.0f} {middle:g} {x[place]:.0f} {middle:g} {x[place]:.0f} {top[level]:g}"
        at, y = x[place], top[level] + BOX
        if place is not way[-1]:
            words += f"V{y:g}"
    return (
        f"<path class='way' d='{words}' marker-end='url(#tip)'><title>{way[0][0]} imports {way[-1][0]}</title></path>"
    )


def rounded(size: int) -> int:
    """Return two digits of the number."""
    unit = 10 ** max(1, len(str(size)) - 2)
    return round(size / unit) * unit


# ------------------------------------------------------------------------------------------------------ checking


def boxes_of(layer_names: Iterable[tuple[int, Sequence[str]]]) -> tuple[dict[str, str], dict[str, int]]:
    """Return the box of each package, and the layer of each box."""
    boxes, layer_of = {name: name for name in BESIDE}, dict(BESIDE)
    for layer, names in layer_names:
        for name in names:
            boxes[name] = JOINED.get(layer, name)
            layer_of[boxes[name]] = layer
    return boxes, layer_of


def picture() -> str:
    """Return the picture of today's imports."""
    found = layers()
    boxes, layer_of = boxes_of((layer, names) for layer, (_, names) in found.items())
    edges, sizes = read(boxes)
    return drawn(reduced(edges), sizes, layer_of, {layer: title for layer, (title, _) in found.items()})


SIZES = re.compile(r"(?<=>)[\d,]+(?=</text>)")


def difference(committed: str, today: str) -> str:
    """Return what has changed since the picture was drawn, or nothing."""
    if SIZES.sub("", committed) != SIZES.sub("", today):
        return "packages or imports have changed"
    for before, now in zip(SIZES.findall(committed), SIZES.findall(today), strict=True):
        old, new = int(before.replace(",", "")), int(now.replace(",", ""))
        if abs(old - new) > max(100, TOLERANCE * old):
            return f"a package of {before} code lines has {now}"
    return ""


def main() -> int:
    """Draw the picture, or check it."""
    today = picture()
    if "--check" not in sys.argv:
        TARGET.write_text(today, encoding="utf-8")
        return 0
    changed = difference(TARGET.read_text(encoding="utf-8") if TARGET.exists() else "", today)
    if changed:
        print(f"docs/images/architecture.svg: {changed}; draw it again: python benchmarks/picture.py")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
