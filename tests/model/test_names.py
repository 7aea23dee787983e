"""The walk through a module under canonical names."""

from torch import nn

from shardwise.model.names import canonical_modules


class CheckpointWrapper(nn.Module):  # a user's own class of a name that torch has too
    def __init__(self, inner):
        super().__init__()
        self._checkpoint_wrapped_module = inner


def names(root):
    return [name for name, _ in canonical_modules(root)]


def test_parents_come_before_children_and_those_in_their_order():
    root = nn.Sequential(nn.Sequential(nn.Linear(1, 1), nn.GELU()), nn.Linear(1, 1))
    assert names(root) == ["", "0", "0.0", "0.1", "1"] == [name for name, _ in root.named_modules()]


def test_a_shared_child_is_there_under_each_name_and_an_empty_place_is_not():
    root, shared = nn.Module(), nn.Sequential(nn.Linear(1, 1))
    root.a, root.nothing, root.b = shared, None, shared
    assert names(root) == ["", "a", "a.0", "b", "b.0"]


def test_a_module_below_itself_ends_the_walk():
    root = nn.Sequential(nn.Sequential())
    root[0].up = root
    assert names(root) == ["", "0"]


def test_wrappers_of_torch_have_no_name_and_a_users_class_of_their_name_has():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    root = nn.Sequential(checkpoint_wrapper(checkpoint_wrapper(nn.Sequential(nn.Linear(1, 1)))))
    assert names(root) == ["", "0", "0.0"]
    assert names(nn.Sequential(CheckpointWrapper(nn.Linear(1, 1)))) == ["", "0", "0._checkpoint_wrapped_module"]
