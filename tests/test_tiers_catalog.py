import random
from collections.abc import Iterator
from contextlib import closing

from lynx_backend.keys import ObjectName, Part
from lynx_backend.testing.tiers import chunk
from lynx_backend.tiers.catalog import ANCHOR_ONLY_SHARE, Catalog

Objects = dict[ObjectName, tuple[int, int]]  # size and last use


def victims(objects: Objects, writing: ObjectName | None) -> Iterator[ObjectName]:
    """The order by its definition, searched for anew each time."""
    passed = []
    while set(passed) < set(objects):
        rest = [name for name in objects if name not in passed]
        residuals = [name for name in rest if name.part == Part.RESIDUAL]
        anchors = [
            name
            for name in rest
            if name.part == Part.ANCHOR and name.key.object(Part.RESIDUAL) not in residuals
        ]
        total = sum(size for size, _ in objects.values())
        crowded = anchor_only(objects)[1] > ANCHOR_ONLY_SHARE * total
        first = anchors if anchors and (crowded or not residuals) else residuals
        name = min(first, key=lambda name: objects[name][1])
        before = objects[name]
        if writing is None or name == writing or name.key != writing.key:
            yield name
        if objects.get(name) == before:
            passed.append(name)


def anchor_only(objects: Objects) -> tuple[int, int]:
    """Number and bytes of the anchors without a residual."""
    sizes = [
        size
        for name, (size, _) in objects.items()
        if name.part == Part.ANCHOR and name.key.object(Part.RESIDUAL) not in objects
    ]
    return len(sizes), sum(sizes)


def test_a_random_history_agrees_with_the_definition():
    rng = random.Random(11)
    names = [chunk(i).object(part) for i in range(40) for part in Part]
    objects: Objects = {}
    catalog = Catalog()
    evicted = 0
    for step in range(15_000):
        now = 1000 * step
        name = rng.choice(names)
        what = rng.random()
        if what < 0.4:
            objects[name] = (rng.randrange(1, 100), now)
            catalog.put(name, *objects[name])
        elif what < 0.55 and name in objects:
            objects[name] = (objects[name][0], now)
            catalog.touch(name, now)
        elif what < 0.8:
            objects.pop(name, None)
            catalog.discard(name)
        elif step % 7500 > 6000:  # after so much coming and going that heaps were made anew
            writing = rng.choice([None, name])
            with closing(catalog.victims(writing)) as found:
                for expected in victims(objects, writing):
                    assert next(found) == expected
                    fate = rng.random()
                    if fate < 0.6:
                        evicted += 1
                        del objects[expected]
                        catalog.discard(expected)
                    elif fate < 0.8:
                        now += 1
                        objects[expected] = (objects[expected][0], now)
                        catalog.touch(expected, now)
                    if rng.random() < 0.15:
                        break
                else:
                    assert next(found, None) is None
        assert (len(catalog), set(catalog)) == (len(objects), set(objects))
        assert catalog.used_bytes == sum(size for size, _ in objects.values())
        assert catalog.anchor_only == anchor_only(objects)[0]
    assert evicted > 1000
