"""The loop: one step, validation, and who calls them."""

import torch

from megatron.checkpointing import check_checkpoint_args, load_checkpoint
from megatron.data.data_utils import (
    build_train_valid_test_data_loaders,
    shift_and_wrap_data_loaders,
)
from megatron.initialize import initialize_megatron
from megatron.logging import tb_wandb_log, training_log
from megatron.model.gpt2_model import GPT2ModelPipe
from megatron.model.utils import get_params_for_weight_decay_optimization
from megatron.utils import get_attn_mask

__all__ = ["GPT2ModelPipe", "check_checkpoint_args", "load_checkpoint", "training_log"]


def get_batch_sequential(forward_input, neox_args):
    attention_mask = get_attn_mask(forward_input[0].shape[1], forward_input[0].device, None)
    return (forward_input[0], forward_input[1], attention_mask)


def forward_step(data_iterator, model, neox_args, timers, return_logits=False, is_train=False):
    if neox_args.is_pipe_parallel:
        return model.eval_batch(data_iterator, return_logits=return_logits)
    return model(next(data_iterator)), {}


def train_step(neox_args, timers, data_iterator, model, optimizer, lr_scheduler):
    loss = model(next(data_iterator))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return {"lm_loss": loss.detach()}, 0


def evaluate(neox_args, forward_step_fn, data_iterator, model, verbose=False, timers=None):
    total = 0.0
    with torch.no_grad():
        for _ in range(neox_args.eval_iters):
            loss, _ = forward_step_fn(
                data_iterator=data_iterator, model=model, neox_args=neox_args, timers=timers
            )
            total += float(loss)
    return {"lm_loss": total / neox_args.eval_iters}


def evaluate_and_print_results(
    neox_args,
    prefix,
    forward_step_func,
    data_iterator,
    model,
    iteration,
    verbose=False,
    timers=None,
    chart_name="validation",
):
    found = evaluate(
        neox_args=neox_args,
        forward_step_fn=forward_step_func,
        data_iterator=data_iterator,
        model=model,
        timers=timers,
    )
    tb_wandb_log(f"{chart_name}/lm_loss", found["lm_loss"], iteration, neox_args.use_wandb)


def get_optimizer(model, neox_args):
    groups = get_params_for_weight_decay_optimization(model, neox_args)
    for group in groups:
        for param in group["params"]:
            if not hasattr(param, "model_parallel"):
                param.model_parallel = False
    return groups


def pretrain(neox_args):
    initialize_megatron(neox_args)
    data_loaders = build_train_valid_test_data_loaders(neox_args)
    iterators = shift_and_wrap_data_loaders(neox_args, data_loaders)
    return iterators if neox_args.do_train and neox_args.train_iters > 0 else None
