"""A fine-tuning run in which the adapter silently did not train, and the norm's statistics moved all the same.

Try:    statecli inspect sample_models/finetune.py:Net
        python sample_models/finetune.py . && statecli diff before.ckpt after.ckpt --must-change 'adapter.*'

Shows:  the optimizer has the parameters of the head only. `diff` shows the changes of one step: two parameters of
        thirteen, and the buffers of the norm, which need no optimizer. `--must-change` fails because the adapter did
        not change; a training log does not show that.
"""

import sys
from pathlib import Path

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, width: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
        self.adapter = nn.Linear(width, width, bias=False)
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 2)
        for parameter in self.parameters():
            nn.init.constant_(parameter, 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.adapter(self.blocks(x))))


def main(folder: str) -> None:
    """Write `before.ckpt` and `after.ckpt`: one step, the blocks frozen and the adapter forgotten.

    Also write `trained.pt`: names of DistributedDataParallel, and the head of an older version of the class.
    """
    net = Net()
    optimizer = torch.optim.SGD(net.head.parameters(), lr=0.01)
    save(net, optimizer, 0, Path(folder) / "before.ckpt")
    net(torch.linspace(-1, 1, 64).reshape(4, 16)).sum().backward()
    optimizer.step()
    save(net, optimizer, 1, Path(folder) / "after.ckpt")
    state = Net().state_dict()
    state["classifier.weight"], state["head.bias"] = state.pop("head.weight"), torch.zeros(3)
    torch.save({f"module.{name}": tensor for name, tensor in state.items()}, Path(folder) / "trained.pt")


def save(net: nn.Module, optimizer: torch.optim.Optimizer, epoch: int, path: Path) -> None:
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, path)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else ".")
