import copy, torch, pytest
import torch.nn as nn
from train.small import *
from train.parity import train, joined_ids, largest_distances

MB=2
class Partly(nn.Module):
    """branch a for microbatches whose first sample's x[0,0]>0, else b; never: unused for ever"""
    def __init__(self):
        super().__init__()
        self.body = Net()
        self.a, self.b, self.never = nn.Linear(CLASSES, CLASSES), nn.Linear(CLASSES, CLASSES), nn.Linear(3, 3)
    def forward(self, x):
        h = self.body(x)
        return (self.a if x[0, 0, 0] > 0 else self.b)(h)

def t(compute, name="adamw"):
    opt = {"name": name, "lr": 0.01, "weight_decay": 0.1, "max_grad_norm": 0.5}
    return small_table(6, model={"build": "test_exp:Partly"}, precision={"compute": compute}, data={"dtype": "float64" if compute == "fp64" else "float32"}, optimizer=opt, batch={"global_batch_size": 4 if compute != "bf16" else 2, "microbatch_size": MB if compute != "bf16" else 1})

@pytest.mark.parametrize("compute", ["fp64", "fp32", "bf16"])
def test_x(run_ranks, compute):
    (one,) = run_ranks(1, train, t(compute), limit_s=30)
    two = run_ranks(2, train, t(compute), limit_s=30)
    print(compute, one.losses, two[0].losses, [list(g) for g in one.gradients], [list(g) for g in two[0].gradients])
    try:
        print(largest_distances(two[0], one))
    except BaseException as e: print(repr(e)[:300])

def test_y(run_ranks):
    table = t("bf16")
    ones = run_ranks(1, train, {**table, "batch": {"global_batch_size": 2, "microbatch_size": 2}}, limit_s=30)
    try:
        two = run_ranks(2, train, table, limit_s=60)
    except Exception as e:
        print(str(e)[-600:]); return
    print([list(g) for g in two[0].gradients], [list(g) for g in two[1].gradients])
    print([ {n: float(g.abs().sum()) for n, g in s.items()} for s in two[0].gradients][:3])
    print([ {n: float(g.abs().sum()) for n, g in s.items()} for s in two[1].gradients][:3])
