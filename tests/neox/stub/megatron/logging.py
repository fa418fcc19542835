"""What a step prints, and where numbers go."""

TRACKED = []


def training_log(
    neox_args,
    timers,
    loss_dict,
    total_loss_dict,
    learning_rate,
    iteration,
    loss_scale,
    report_memory_flag,
    skipped_iter,
    model,
    optimizer,
    noise_scale_logger,
):
    return report_memory_flag


def tb_wandb_log(
    key, value, iteration_no, use_wandb, tensorboard_writer=None, comet_experiment=None
):
    TRACKED.append((key, value, iteration_no))
