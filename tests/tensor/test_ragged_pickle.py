"""A file of a part of a sharded model or state holds that part, not the buffer that it is a view of
(pytorch#79400, pytorch#95278)."""

import copy
import io

import torch
from torch import nn

from ranks import on_ranks
from sharding import fully_shard
from small_models import full, full_gradients, set_gradients
from vfsdp_optim import AdamW


@on_ranks(2)
def test_file_of_a_part_holds_the_part_alone() -> None:
    """Save one weight and its state, compare sizes, and load them."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(16)])
    fully_shard(model)
    optimizer = AdamW(model.named_parameters())
    set_gradients(model.parameters(), full_gradients(model.parameters(), 0))
    optimizer.step()
    weight = model[3].weight
    weight.label = "kept"
    for part in (dict(optimizer.state[weight]), {"weight": weight}, {"weight": weight.detach()}):
        pieces = [x.to_local() if hasattr(x, "to_local") else x for x in part.values()]
        needed = sum(piece.numel() * piece.element_size() for piece in pieces)
        file = io.BytesIO()
        torch.save(part, file)
        assert file.tell() < needed + 8000, (file.tell(), needed)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        for key, value in part.items():
            assert type(loaded[key]) is type(value)
            assert isinstance(loaded[key], nn.Parameter) == isinstance(value, nn.Parameter)
            assert loaded[key].requires_grad == value.requires_grad
            assert torch.equal(full(loaded[key]), full(value))
    assert copy.deepcopy(weight).label == "kept"
