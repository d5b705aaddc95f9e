"""A training script with every kind of state. `drop` are states that are not loaded, `unsaved` states not saved."""

from __future__ import annotations

import os
import random
from collections import deque
from types import SimpleNamespace

import numpy
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

STATES = ("step", "model", "optimizer", "scheduler", "scaler", "average", "data", "random")


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))


class Training:
    """All the objects of a training, and the state to save."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        random.seed(0)
        numpy.random.seed(0)
        self.data = torch.randn(64, 4)
        self.model = Net()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.step = self.position = 0

    def save(self, path: str, unsaved: tuple[str, ...]) -> None:
        state = {name: getattr(self, name).state_dict() for name in STATES[1:6]}
        state |= {"step": self.step, "data": self.position, "random": self.get_random()}
        torch.save({name: value for name, value in state.items() if name not in unsaved}, path)

    def load(self, path: str, drop: tuple[str, ...]) -> None:
        saved = torch.load(path, weights_only=False)
        for name in STATES[1:6]:
            if name not in drop:
                getattr(self, name).load_state_dict(saved[name])
        self.step = 0 if "step" in drop else saved["step"]
        self.position = 0 if "data" in drop else saved["data"]
        if "random" not in drop:
            torch.set_rng_state(saved["random"][0])
            random.setstate(saved["random"][1])
            numpy.random.set_state(saved["random"][2])

    def get_random(self) -> tuple:
        return torch.get_rng_state(), random.getstate(), numpy.random.get_state()

    def train_step(self) -> None:
        batch = self.data[self.position : self.position + 8]
        self.position += 8
        self.optimizer.zero_grad()
        loss = (self.model(batch) * (1 + random.gauss(0, 1) + numpy.random.rand())).pow(2).mean()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.scheduler.step()
        self.average.update_parameters(self.model)
        self.step += 1


def main(steps, save_every, save_to, checkpoint, drop=(), unsaved=()):
    training = Training()
    if checkpoint:
        training.load(checkpoint, drop)
    while training.step < steps:
        training.train_step()
        if training.step % save_every == 0:
            training.save(f"{save_to}/step-{training.step}.pt", unsaved)


def chance(steps, save_every, save_to, checkpoint):
    """A script without a seed, and without its scheduler in the checkpoint."""
    training = Training()
    torch.seed()
    if checkpoint:
        training.load(checkpoint, ("scheduler", "random"))
    while training.step < steps:
        training.train_step()
        if training.step % save_every == 0:
            training.save(f"{save_to}/step-{training.step}.pt", ())


def plain(steps, save_every, save_to, checkpoint, uses_losses=False):
    """A script without random numbers after the start; `uses_losses`: losses change the model."""
    torch.manual_seed(0)
    data = torch.randn(64, 4)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start, losses = 0, []
    if checkpoint:
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        start = saved["step"]
        torch.randn(3)
    for step in range(start, steps):
        optimizer.zero_grad()
        loss = model(data[step * 8 : step * 8 + 8]).pow(2).mean()
        losses.append(float(loss.detach()))
        loss.backward()
        optimizer.step()
        if uses_losses:
            with torch.no_grad():
                model.bias.add_(sum(losses))
        if (step + 1) % save_every == 0:
            torch.save({"model": model.state_dict(), "step": step + 1}, f"{save_to}/{step + 1}.pt")


def uses_losses(**options):
    plain(**options, uses_losses=True)


def forgetful(steps, save_every, save_to, checkpoint):
    """A script with a dict of averages that no checkpoint contains."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    shadow = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    start = 0
    if checkpoint:
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        start = saved["step"]
    for step in range(start, steps):
        optimizer.zero_grad()
        model(torch.full((2, 4), float(step))).sum().backward()
        optimizer.step()
        for name, tensor in model.named_parameters():
            shadow[name].lerp_(tensor.detach(), 0.1)
        if (step + 1) % save_every == 0:
            torch.save({"model": model.state_dict(), "step": step + 1}, f"{save_to}/{step + 1}.pt")


def loader(steps, save_every, save_to, checkpoint, call=lambda model, batch: model(batch)):
    """A script with a DataLoader that begins again after a resume."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = torch.utils.data.DataLoader(torch.randn(64, 4), batch_size=4)
    start = 0
    if checkpoint:
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        start = saved["step"]
    for step, batch in zip(range(start, steps), batches, strict=False):
        optimizer.zero_grad()
        call(model, batch).sum().backward()
        optimizer.step()
        if (step + 1) % save_every == 0:
            torch.save({"model": model.state_dict(), "step": step + 1}, f"{save_to}/{step + 1}.pt")


def keyword_loader(**options):
    """Calls forward by keyword, as the trainer of transformers does."""
    loader(**options, call=lambda model, batch: model(input=batch))


def silent(steps, save_every, save_to, checkpoint):
    """Writes no checkpoint."""
    plain(steps, steps + 1, save_to, checkpoint)


def raises_on_resume(steps, save_every, save_to, checkpoint):
    if checkpoint:
        raise ValueError("no such key\nsecond line")
    plain(steps, save_every, save_to, checkpoint)


def short(steps, save_every, save_to, checkpoint):
    plain(1, 1, save_to, checkpoint)


def ignoring(**options):
    """Loads only the step and the position."""
    main(**options, drop=(*STATES[1:6], "random"))


for _state in STATES:
    globals()[f"drop_{_state}"] = lambda _state=_state, **options: main(**options, drop=(_state,))
    globals()[f"unsaved_{_state}"] = lambda _state=_state, **options: main(**options, drop=(_state,), unsaved=(_state,))


def dropping(steps, save_every, save_to, checkpoint):
    """Dropout alone draws random numbers; the other generators have other states in each process."""
    torch.manual_seed(0)
    random.seed(os.getpid())
    numpy.random.seed(os.getpid())
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start = 0
    if checkpoint:
        saved = torch.load(checkpoint)
        start = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    for step in range(start, steps):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        if (step + 1) % save_every == 0:
            saved = {"step": step + 1, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(saved, os.path.join(save_to, f"{step + 1}.pt"))


def own_names(steps, save_every, save_to, checkpoint, drop=()):
    """A script that saves random states and a position under its own names, and does not load the states in `drop`."""
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(64, 4)
    setters = {"rng": torch.set_rng_state, "py": random.setstate, "np": numpy.random.set_state}
    start = position = 0
    if checkpoint:
        saved = torch.load(checkpoint, weights_only=False)
        model.load_state_dict(saved["net"])
        start = saved["step"]
        position = 0 if "pos" in drop else saved["pos"]
        for name in setters.keys() - set(drop):
            setters[name](saved[name])
    for step in range(start, steps):
        optimizer.zero_grad()
        factor = 1 + torch.rand(1) + random.gauss(0, 1) + numpy.random.rand()
        (model(data[position : position + 8]) * factor).square().sum().backward()
        optimizer.step()
        position += 8
        if (step + 1) % save_every == 0:
            states = {"rng": torch.get_rng_state(), "py": random.getstate(), "np": numpy.random.get_state()}
            saved = {"net": model.state_dict(), "step": step + 1, "pos": position, **states}
            torch.save(saved, os.path.join(save_to, f"{step + 1}.pt"))


for _name in ("rng", "py", "np", "pos"):
    globals()[f"own_{_name}"] = lambda _name=_name, **options: own_names(**options, drop=(_name,))


def own_generator(steps, save_every, save_to, checkpoint, draws_data=True, loads=()):
    """A script that draws batches or noise from its own generator, and saves this generator and that of torch."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(64, 4)
    g = torch.Generator().manual_seed(1)
    start = 0
    if checkpoint:
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["net"])
        start = saved["step"]
        for name, load in {"g": g.set_state, "rng": torch.set_rng_state}.items():
            if name in loads:
                load(saved[name])
    for step in range(start, steps):
        optimizer.zero_grad()
        batch = data[torch.randint(64, (8,), generator=g)] if draws_data else data[:8]
        factor = 1 + torch.rand(1) + (0 if draws_data else torch.rand(1, generator=g))
        (model(batch) * factor).square().sum().backward()
        optimizer.step()
        if (step + 1) % save_every == 0:
            states = {"g": g.get_state(), "rng": torch.get_rng_state()}
            torch.save({"net": model.state_dict(), "step": step + 1, **states}, f"{save_to}/{step + 1}.pt")


for _name, _settings in {
    "data": {"loads": ("rng",)},
    "noise": {"draws_data": False, "loads": ("rng",)},
    "torch": {"draws_data": False, "loads": ("g",)},
    "both": {"loads": ("g", "rng")},
}.items():
    globals()[f"generator_{_name}"] = lambda _settings=_settings, **options: own_generator(**options, **_settings)


def two_models(steps, save_every, save_to, checkpoint, extra_call="none", drop=""):
    """A model and its head, each with an optimizer; `extra_call`: "closure", "metric" or "none"."""
    torch.manual_seed(0)
    random.seed(0)
    numpy.random.seed(0)
    data = torch.randn(64, 4)
    model, head = nn.Linear(4, 2), nn.Linear(2, 2)
    optimizer, head_optimizer = (torch.optim.SGD(part.parameters(), lr=0.1) for part in (model, head))
    start = first_row = 0
    if checkpoint:
        saved = torch.load(checkpoint)
        start = saved["step"]
        first_row = start * 8 if drop == "data" else 0
        for name, part in {"model": model, "head": head}.items():
            if name != drop:
                part.load_state_dict(saved[name])
    for step in range(start, steps):
        batch = data[step * 8 - first_row :][:8]

        def compute_loss(batch=batch):
            optimizer.zero_grad()
            loss = model(batch).square().sum()
            loss.backward()
            return loss

        if extra_call == "closure":
            optimizer.step(compute_loss)
        else:
            compute_loss()
            optimizer.step()
        head_optimizer.zero_grad()
        head(model(batch).detach()).square().sum().backward()
        head_optimizer.step()
        if extra_call == "metric":
            model(batch).argmax(-1)
        if (step + 1) % save_every == 0:
            states = {"model": model.state_dict(), "head": head.state_dict(), "step": step + 1}
            torch.save(states, f"{save_to}/{step + 1}.pt")


for _call in ("none", "metric", "closure"):
    for _drop in ("nothing", "model", "head", "data"):
        globals()[f"two_models_{_call}_{_drop}"] = lambda _call=_call, _drop=_drop, **options: two_models(
            **options, extra_call=_call, drop=_drop
        )


def ensemble(steps, save_every, save_to, checkpoint, hidden=False, lost=1):
    """Models of one class in a list, each with an optimizer; the model at the index `lost` is not loaded."""
    torch.manual_seed(0)
    nets = [nn.Linear(4, 2) for _ in range(3)]
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    pairs = list(zip(nets, optimizers, strict=True))
    start = 0
    if checkpoint:
        saved = torch.load(checkpoint)
        start = saved["step"]
        for number, net in enumerate(nets):
            if number != lost:
                net.load_state_dict(saved["nets"][number])
    if hidden:
        del nets
    for step in range(start, steps):
        for net, optimizer in pairs:
            optimizer.zero_grad()
            net(torch.full((2, 4), step + 1.0)).square().sum().backward()
            optimizer.step()
        if (step + 1) % save_every == 0:
            states = [pair[0].state_dict() for pair in pairs]
            torch.save({"nets": states, "step": step + 1}, f"{save_to}/{step + 1}.pt")


def hidden_ensemble(**options):
    ensemble(**options, hidden=True)


def loaded_ensemble(**options):
    ensemble(**options, hidden=True, lost=None)


def accumulating(steps, save_every, save_to, checkpoint, skipped=0):
    """Four batches a step; `skipped`: number of batches that the first step of the resumed training leaves out."""
    torch.manual_seed(0)
    data = torch.randn(64, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    start = first = 0
    if checkpoint:
        saved = torch.load(checkpoint)
        start = saved["step"]
        first = start * 4 + skipped
        model.load_state_dict(saved["model"])
    for step in range(start, steps):
        optimizer.zero_grad()
        for number in range(step * 4, step * 4 + 4):
            if number >= first:
                model(data[number * 4 :][:4]).square().mean(0)[0].backward()
        optimizer.step()
        if (step + 1) % save_every == 0:
            torch.save({"model": model.state_dict(), "step": step + 1}, f"{save_to}/{step + 1}.pt")


def accumulating_less(**options):
    accumulating(**options, skipped=3)


class Opaque(torch.Tensor):
    """A tensor without bytes of its own; `inner` holds the values."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner)
        raise NotImplementedError(f"Opaque does not support {func}")


class Flat(Opaque):
    """Names the tensors that hold its values."""

    def __tensor_flatten__(self):
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        return Flat(inner["inner"])


class Settings:
    __slots__ = ("factor",)


def add_state(steps, save_every, save_to, checkpoint, create):
    """A buffer, or a setting of the optimizer, that no checkpoint has: `create` gets the number of the run."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = create(1 if checkpoint else 0)
    if isinstance(state, torch.Tensor):
        model.register_buffer("extra", state, persistent=False)
    else:
        optimizer.param_groups[0]["extra"] = state
    start = 0
    if checkpoint:
        saved = torch.load(checkpoint)
        model.load_state_dict(saved["model"])
        start = saved["step"]
    for step in range(start, steps):
        optimizer.zero_grad()
        model(torch.full((2, 4), float(step))).sum().backward()
        optimizer.step()
        if (step + 1) % save_every == 0:
            torch.save({"model": model.state_dict(), "step": step + 1}, f"{save_to}/{step + 1}.pt")


def create_circle(number, count=2):
    """Objects that each refer to all of them."""
    items = [SimpleNamespace(number=number) for _ in range(count)]
    for item in items:
        item.items = list(items)
    return items[0]


def fill_(module, number):
    for parameter in module.parameters():
        nn.init.constant_(parameter, number)
    return module


def _create_settings(number):
    settings = Settings()
    settings.factor = number
    return settings


for _name, _create in {
    "opaque": lambda number: Opaque(torch.full((3,), float(number))),
    "flat": lambda number: Flat(torch.full((3,), float(number))),
    "scale": lambda number: torch.quantize_per_tensor(torch.full((3,), 1.0 + number), 1.0 + number, 0, torch.qint8),
    "slots": _create_settings,
    "array": lambda number: {"rows": numpy.full(3, number)},
    "set": lambda number: deque([{number}]),
    "circle": create_circle,
    "web": lambda number: create_circle(number, count=20),
    "model": lambda number: SimpleNamespace(net=fill_(nn.Embedding(2, 2), number)),
    "object": lambda number: SimpleNamespace(factor=number, call=len, kind=Settings, dtype=torch.half),
}.items():
    globals()[f"unsaved_{_name}"] = lambda _create=_create, **options: add_state(**options, create=_create)
    globals()[f"same_{_name}"] = lambda _create=_create, **options: add_state(**options, create=lambda _: _create(1))


def few(steps, save_to):
    """Takes too few arguments."""


def many(steps, save_every, save_to, checkpoint, rate):
    """Takes an argument without a default."""


def printing(**options):
    print("print of the script")
    plain(**options)


class Shadow:
    """An average of the weights in a plain object: a dict, and a list as in torch_ema."""

    def __init__(self, model):
        self.shadow = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
        self.shadow_params = [tensor.detach().clone() for tensor in model.parameters()]

    def update(self, model):
        for tensor, shadow in zip(model.parameters(), self.shadow_params, strict=True):
            shadow.lerp_(tensor.detach(), 0.1)
        for name, tensor in model.named_parameters():
            self.shadow[name].lerp_(tensor.detach(), 0.1)


def carrying(steps, save_every, save_to, checkpoint, drop="", unsaved=()):
    """A script with two optimizers, a chained schedule, its own generators, averages in an object, and a counter."""
    torch.manual_seed(0)
    g, d = nn.Linear(4, 4), nn.Linear(4, 1)
    og, od = (torch.optim.Adam(part.parameters(), lr=0.1) for part in (g, d))
    kinds = torch.optim.lr_scheduler
    schedule = kinds.SequentialLR(og, [kinds.LinearLR(og), kinds.ConstantLR(og)], [3])
    generator, rng, ema = random.Random(1), numpy.random.default_rng(1), Shadow(g)  # noqa: S311
    position = seen = 0
    if checkpoint:
        saved = torch.load(checkpoint, weights_only=False)
        position = saved["step"]
        for name, part in {"g": g, "d": d, "og": og, "od": od, "schedule": schedule}.items():
            if name != drop:
                part.load_state_dict(saved[name])
        if drop != "generator":
            generator.setstate(saved["generator"])
        if drop != "rng":
            rng.bit_generator.state = saved["rng"]
        if drop != "ema":
            vars(ema).update(saved["ema"])
        seen = 0 if drop == "seen" else saved["seen"]
    for step in range(position, steps):
        noise = generator.random() + rng.random()
        og.zero_grad()
        (d(g(torch.full((2, 4), step + 1.0))) * noise).sum().backward()
        og.step()
        schedule.step()
        od.zero_grad()
        d(g(torch.ones(2, 4)).detach()).square().sum().backward()
        od.step()
        ema.update(g)
        seen += 2
        if (step + 1) % save_every == 0:
            weights = {name: tensor.clone() for name, tensor in g.state_dict().items()}
            parts = {"d": d, "og": og, "od": od, "schedule": schedule}
            saved = {"g": weights, "step": step + 1, "seen": seen, "path": save_to, "pid": os.getpid()}
            saved |= {"pytorch-lightning_version": "2.6.6", "loops": {"ready": step + 1 - position}}
            saved |= {name: part.state_dict() for name, part in parts.items()}
            saved |= {"generator": generator.getstate(), "rng": rng.bit_generator.state, "ema": dict(vars(ema))}
            torch.save({key: value for key, value in saved.items() if key not in unsaved}, f"{save_to}/{step + 1}.pt")


for _name in ("nothing", "g", "d", "og", "od", "schedule", "generator", "rng", "ema", "seen"):
    globals()[f"carrying_without_{_name}"] = lambda _name=_name, **options: carrying(**options, drop=_name)


def carrying_unsaved_ema(**options):
    carrying(**options, drop="ema", unsaved=("ema",))


def carrying_unsaved_og(**options):
    carrying(**options, drop="og", unsaved=("og",))
