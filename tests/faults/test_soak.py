"""A round of the soak: training through faults ends with the bits of a run that had none."""

import copy

import torch
from soak import differences, main


def test_training_through_kills_stops_and_exceptions_has_the_bits_of_an_undisturbed_run(capsys):
    assert main(["--rounds", "1", "--seed", "6"]) == 0, capsys.readouterr().out


def test_soak_sees_a_difference_of_one_bit() -> None:
    state = {"model": {"w": torch.ones(3)}, "step": [1, 2.0]}
    other = copy.deepcopy(state)
    assert differences(state, other) == []
    other["model"]["w"][1] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    other["step"][0] = 2
    assert differences(state, other) == ["['model']['w']", "['step'][0]"]
