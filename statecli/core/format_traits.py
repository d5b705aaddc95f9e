"""Traits of a format: everything that commands know about the format of a state, apart from its name.

Each reader fills in its traits, so that a new format is one module. This module imports no other module of statecli.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec


class FormatTraits(msgspec.Struct, frozen=True):
    """Properties of a format that commands depend on. The defaults fit most formats.

    Attributes:
        is_class: The state is of a live model class, not of a checkpoint.
        is_program: The file is run as saved: it stores unregistered tensors, and may have no weights.
        is_training_folder: A folder with the model and the rest of a training run.
        keeps_order: Tensors are in the order of saving.
        distinguishes_case: The format's own loader distinguishes names by case alone.
        never_mapped: Reason why no loader maps the files into memory; None if loaders may.
        is_legacy: A file is a stream of pickles, from before torch 1.6.
        mixed_dtypes: Reason why the tensors of one model have several dtypes on purpose; None for a single dtype.
        settings_are_text: Every setting is text: numbers are written as text.
        drops_tied_names: A tied tensor is stored under one name; its other names are settings (name: stored name).
        own_settings: Settings about the files, not the model.
        settings_vocabulary: Name of the vocabulary of the settings, if other formats lack these settings.
        settings_describe_program: Every setting describes the program, none is an attribute of a module.
        settings_are_compiled: Settings are attributes of compiled modules: the attributes used by the code, without the
            Python types of keys and containers.
        may_hold_settings_alone: A file with settings and without tensors is complete.
        weights_are_optimizer_copies: Weights exist as float32 copies of the optimizer only.
        is_partitioned: Weights without elements may be in the partitions of other ranks.
        is_header_and_tensors: A file has one header and the tensors: the header lists the tensors quickly, and
            `safetensors.torch.load_file` reads the file.
        is_in_pieces: The folder has a checkpoint's pieces or ranks. Weights next to the pieces belong to another
            loader.
        is_loaded_by_dcp: `torch.distributed.checkpoint.load` reads the folder, whose tensors have the paths of the
            saved dict as names.
        has_own_loader: A library loads the pickles, not `torch.load(path)`.
        key_setting: Last key of the settings with the keys of tensors whose names do not show their keys; other formats
            do not have these keys.
        has_collections: A model's collections (trained parameters, statistics) are sections of their own.
    """

    is_class: bool = False
    is_program: bool = False
    is_training_folder: bool = False
    keeps_order: bool = True
    distinguishes_case: bool = False
    never_mapped: str | None = None
    is_legacy: bool = False
    mixed_dtypes: str | None = None
    settings_are_text: bool = False
    drops_tied_names: bool = False
    own_settings: frozenset[str] = frozenset()
    settings_vocabulary: str = ""
    settings_describe_program: bool = False
    settings_are_compiled: bool = False
    may_hold_settings_alone: bool = False
    weights_are_optimizer_copies: bool = False
    is_partitioned: bool = False
    is_header_and_tensors: bool = False
    is_in_pieces: bool = False
    is_loaded_by_dcp: bool = False
    has_own_loader: bool = False
    key_setting: str = ""
    has_collections: bool = False


def combine_traits(traits: Iterable[FormatTraits]) -> FormatTraits:
    """Return the traits of a checkpoint in several files, combined from the traits of each file.

    Traits of a whole checkpoint (a program, partitions, collections) and of a single file (a header and tensors) are
    not inherited.
    """
    files = tuple(traits)
    return FormatTraits(
        is_training_folder=any(file.is_training_folder for file in files),
        keeps_order=all(file.keeps_order for file in files),
        is_legacy=any(file.is_legacy for file in files),
        mixed_dtypes=next((file.mixed_dtypes for file in files if file.mixed_dtypes), None),
        settings_are_text=any(file.settings_are_text for file in files),
        drops_tied_names=any(file.drops_tied_names for file in files),
        own_settings=frozenset[str]().union(*(file.own_settings for file in files)),
        settings_vocabulary=next((file.settings_vocabulary for file in files if file.settings_vocabulary), ""),
    )
