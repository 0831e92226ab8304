"""Settings of the model."""

from __future__ import annotations

from hvd_train import Config
from hvd_train.commands.train import parse_train


def test_entries_to_unfreeze_are_a_list_of_their_own() -> None:
    """Each word after the flag is an entry, and a resumed run must have the same ones."""
    arguments = ["digits", "--freeze", "backbone", "--unfreeze", "5:layer4.*", "10:*"]
    config = parse_train(arguments)
    assert config.model.unfreeze == ("5:layer4.*", "10:*")
    assert config.differences(config.replace(unfreeze=("5:layer4.*",))) != []


def test_a_network_trains_whole_and_from_random_weights_unless_typed_otherwise() -> None:
    """Nothing is frozen and no weights are loaded by default."""
    model = Config().model
    assert (model.weights, model.freeze, model.unfreeze, model.sync_batch_norm) == (None, "none", (), False)
