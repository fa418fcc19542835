"""A checkpoint must have been made with these arguments."""


def check_checkpoint_args(neox_args, checkpoint_args):
    for key, value in checkpoint_args.items():
        assert getattr(neox_args, key) == value, key
