"""DTensors: the local piece of one, and where it lies in the whole."""

from __future__ import annotations

import torch
from holdings import Place
from in_pieces import InPieces
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


class DistributedTensors(InPieces):
    """Every parameter is a DTensor on the mesh that `wrap` has made."""

    def make_mesh(self, **sizes: int) -> DeviceMesh:
        """The one mesh of all ranks, with named dimensions; neighbours differ in the last."""
        names = tuple(sizes)
        self._mesh = init_device_mesh(self.device.type, tuple(sizes.values()), mesh_dim_names=names)
        return self._mesh

    def local(self, tensor: torch.Tensor) -> torch.Tensor:
        assert isinstance(tensor, DTensor)
        return tensor.detach().to_local()

    def places(self, shapes: dict[str, torch.Size]) -> dict[str, Place]:
        return {name: _place(shapes[name], each) for name, each in self.parameters.items()}

    def finish_gradients(self) -> None:
        """Add up what each rank knows a part of, such as gradients of norms on split sequences."""
        for parameter in self.parameters.values():
            grad = parameter.grad
            if isinstance(grad, DTensor) and isinstance(parameter, DTensor):
                parameter.grad = grad.redistribute(placements=parameter.placements)

    def release(self) -> None:
        # Caches of DTensor keep the mesh, and the mesh keeps the process groups and their threads.
        getattr(self._mesh, "_pg_registry", {}).clear()


def _place(shape: torch.Size, parameter: nn.Parameter) -> Place:
    assert isinstance(parameter, DTensor)
    mesh, placements = parameter.device_mesh, parameter.placements
    size, start = compute_local_shape_and_global_offset(shape, mesh, placements)
    return Place(tuple(start), tuple(size))
