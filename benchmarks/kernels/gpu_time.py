"""GPU time of an observation against the alternatives, where there is a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module

import torch
import triton

from benchmarks.kernels.host_time import make_rows
from distmon.layout.plain import plain_shard
from distmon.probe.triton_probe import TritonProbe
from distmon.sampling.plan import build_plan


def fused_norms(grads: list[torch.Tensor]) -> dict[str, Callable[[], object] | str]:
    """Return per-tensor norms in one launch as other packages do it, or why they are skipped."""
    contenders: dict[str, Callable[[], object] | str] = {}
    overflow = torch.zeros(1, dtype=torch.int32, device=grads[0].device)
    for package, operators, applier in (
        ("apex", "amp_C", "apex.multi_tensor_apply"),
        ("TransformerEngine", "transformer_engine_torch", "transformer_engine.pytorch.optimizers"),
    ):
        name = f"{package} multi_tensor_l2norm"
        try:
            norm = import_module(operators).multi_tensor_l2norm
            apply = import_module(applier).multi_tensor_applier
            contenders[name] = partial(apply, norm, overflow, [grads], True)
        except (ImportError, AttributeError) as error:
            contenders[name] = f"skipped: {error}"
    return contenders


def gpu_times() -> None:
    """Print the times; without a GPU, that there are none."""
    if not torch.cuda.is_available():
        print("\nno GPU here: no GPU time was measured and none is printed")
        return
    device = torch.device("cuda")
    parameters = [torch.nn.Parameter(torch.randn(1 << 20, device=device)) for _ in range(200)]
    for p in parameters:
        p.grad = torch.randn_like(p)
    shards = [plain_shard(f"p{i}", p) for i, p in enumerate(parameters)]
    plan = build_plan(shards, 1024, 0, device)
    rows = make_rows(len(shards), device)
    applied = torch.ones(len(shards), dtype=torch.float64, device=device)
    sampled, exact = TritonProbe(plan, shards), TritonProbe(plan, shards, exact=True)
    grads = [p.grad for p in parameters]
    print(f"\nmeasured on {torch.cuda.get_device_name()}: 200 parameters of 2**20 fp32")
    contenders: dict[str, Callable[[], object] | str] = {
        "snapshot launch": sampled.snapshot,
        "statistics launch": lambda: sampled.measure(rows, applied),
        "exact": lambda: exact.measure(rows, applied),
        "torch._foreach_norm of gradients": lambda: torch._foreach_norm(grads),
        "naive clone of weights": lambda: [p.detach().clone() for p in parameters],
        **fused_norms(grads),
    }
    for name, call in contenders.items():
        if isinstance(call, str):
            print(f"  {name:36} {call}")
            continue
        milliseconds = triton.testing.do_bench(call, quantiles=[0.2, 0.5, 0.8])
        print(f"  {name:36} p20/p50/p80 {' / '.join(f'{t:.3f}' for t in milliseconds)} ms")
