"""Exchange what each rank holds, once, at attach.

Most runs need one small collective: the ranks find that all of them hold the same model. Where they
do not, as with pipeline stages, one rank of each kind broadcasts its list.
"""

from __future__ import annotations

import json

import torch

from distmon.layout.parameter_table import Entry, ModuleEntry, RankContents
from distmon.reduce.process_group import Ranks
from distmon.sampling.sample import hash48


def exchange(ranks: Ranks, mine: RankContents) -> dict[int, RankContents]:
    """Return the different contents of all ranks, each under the lowest rank that has it.

    A collective call. A rank that failed to read its model passes empty contents.
    """
    parameters = [
        [e.name, e.shape, e.dtype, e.requires_grad, e.may_be_partial] for e in mine.parameters
    ]
    listed = ([[e.name, e.kind] for e in entries] for entries in (mine.modules, mine.inside))
    text = json.dumps([parameters, *listed])
    raw = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
    table = ranks.gather(torch.tensor([hash48(text), len(raw)])).tolist()
    sources: dict[int, int] = {}
    for rank, (key, _) in enumerate(table):
        sources.setdefault(key, rank)
    if len(sources) == 1:
        return {0: mine}
    contents = {}
    for rank in sources.values():
        sent = raw if rank == ranks.rank else torch.zeros(table[rank][1], dtype=torch.uint8)
        ranks.broadcast(sent, rank)
        rows, modules, inside = json.loads(sent.numpy().tobytes())
        contents[rank] = RankContents(
            [Entry(name, tuple(shape), *rest) for name, shape, *rest in rows],
            [ModuleEntry(*each) for each in modules],
            [ModuleEntry(*each) for each in inside],
        )
    return contents
