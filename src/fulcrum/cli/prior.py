"""`fulcrum prior`: pretrain a built-in CNN on synthetic images, for initial weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fulcrum.cli.options import DebugOption, QuietOption
from fulcrum.errors import ConfigError


def prior(
    model: Annotated[str, typer.Argument(help="mnist-cnn or cifar-cnn.")],
    out: Annotated[Path, typer.Option("--out", help="File to write, ending in .npz.")] = Path("prior.npz"),
    activation: Annotated[str, typer.Option("--activation", help="relu, tanh or tempered.")] = "relu",
    kinds: Annotated[int, typer.Option("--kinds", min=2, help="Kinds of pictures to tell apart.")] = 1000,
    pool: Annotated[int, typer.Option("--pool", min=0, help="Pictures painted beforehand; 0: new each step.")] = 0,
    steps: Annotated[int, typer.Option("--steps", min=1, help="Steps of 512 pictures.")] = 8000,
    jitter: Annotated[float, typer.Option("--jitter", min=0.0, help="How far pictures of a kind differ.")] = 1.0,
    scene: Annotated[float, typer.Option("--scene", min=0.0, max=1.0, help="Part with another picture behind.")] = 0.0,
    colours: Annotated[float, typer.Option("--colours", min=0.0, max=1.0, help="How far colours are changed.")] = 0.0,
    scale: Annotated[float, typer.Option("--scale", min=1e-3, help="Multiplies the weights at the end.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of recipes, pictures and first weights.")] = 0,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N.")] = "auto",
    quiet: QuietOption = False,
    debug: DebugOption = False,
) -> None:
    """Pretrain a CNN on synthetic images and save its weights, as initial weights for private training.

    No data set is read. Use them with --set model.init=FILE; if you choose between recipes by results on data, the
    choice has seen that data.
    """
    from torch import nn

    from fulcrum import runs as api
    from fulcrum.cli import view
    from fulcrum.models import pretrain as priors
    from fulcrum.models.build import build_model
    from fulcrum.models.builtin import AUTO_MODELS
    from fulcrum.models.pretrain import learn
    from fulcrum.settings import schema as config

    shapes = {name: shape for shape, name in AUTO_MODELS.items()}
    if model not in shapes:
        raise ConfigError(f"model = {model!r} cannot be taught on pictures; choose one of {', '.join(shapes)}.")
    if out.suffix != ".npz":
        raise ConfigError(f"--out = {out} must end in .npz.")
    # Before the pretraining, which takes long: nothing is overwritten, and nothing is lost.
    if out.exists():
        raise ConfigError(f"--out = {out} exists; choose another name, or remove it first.")
    if not out.parent.is_dir():
        raise ConfigError(f"--out = {out}: {out.parent} does not exist; make that folder first.")
    if scale != 1.0 and activation != "relu":
        raise ConfigError(
            f"--scale = {scale:g} keeps the network's work only with relu; leave it out with {activation}."
        )
    built = build_model(config.Model(name=model, activation=activation), shapes[model], 10, seed)
    assert isinstance(built, nn.Sequential)
    lesson = learn.PretrainSettings(
        kinds=kinds, pool=pool, steps=steps, jitter=jitter, scene=scene, colours=colours, scale=scale, seed=seed
    )
    place = api.find_device(device)
    right = learn.pretrain_model(built, shapes[model], lesson, place, lambda line: view.print_message(line, quiet))
    priors.save_weights(
        out, {**learn.get_trunk_weights(built), **learn.compute_input_statistics(built, shapes[model], lesson, place)}
    )
    typer.echo(f"wrote {out}; the network tells {100 * right:.1f}% of {kinds} kinds. Use it: --set model.init={out}")
