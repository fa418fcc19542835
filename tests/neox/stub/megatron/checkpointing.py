"""A checkpoint must have been made with these arguments."""


def check_checkpoint_args(neox_args, checkpoint_args):
    for key, value in checkpoint_args.items():
        assert getattr(neox_args, key) == value, key


def get_checkpoint_tag(iteration):
    return f"global_step{iteration}"


def save_ds_checkpoint(iteration, model, neox_args):
    model.save_checkpoint(neox_args.save, tag=get_checkpoint_tag(iteration))


def load_checkpoint(neox_args, model, optimizer, lr_scheduler, inference=False, iteration=None):
    model.load_checkpoint(neox_args.load, tag=iteration)
    return iteration or 0
