"""The table of schedules that contract tests run over."""

from torch.optim import lr_scheduler

from hfta_func import schedules

LR = [0.1, 0.3, 1.0]

# Each row: the schedule of all members, and the scheduler of torch that member i follows.
SCHEDULES = {
    "constant": (schedules.constant(LR), lambda i, optimizer: lr_scheduler.ConstantLR(optimizer, factor=1.0)),
    "step_lr": (
        schedules.step_lr(LR, step_size=[3, 7, 10], gamma=[0.1, 0.5, 0.9]),
        lambda i, optimizer: lr_scheduler.StepLR(optimizer, [3, 7, 10][i], [0.1, 0.5, 0.9][i]),
    ),
    "cosine": (
        schedules.cosine(LR, T_max=[40, 50, 65], eta_min=[0.0, 0.01, 0.2]),
        lambda i, optimizer: lr_scheduler.CosineAnnealingLR(optimizer, [40, 50, 65][i], [0.0, 0.01, 0.2][i]),
    ),
    "multistep": (
        schedules.multistep(LR, milestones=[[3, 7, 10], 20, [20, 30, 39]], gamma=[0.1, 0.5, 0.9]),
        lambda i, optimizer: lr_scheduler.MultiStepLR(
            optimizer, [[3, 7, 10][i], 20, [20, 30, 39][i]], [0.1, 0.5, 0.9][i]
        ),
    ),
    "exponential": (
        schedules.exponential(LR, gamma=[0.9, 0.99, 1.01]),
        lambda i, optimizer: lr_scheduler.ExponentialLR(optimizer, [0.9, 0.99, 1.01][i]),
    ),
    "linear": (
        schedules.linear(LR, total_iters=[5, 10, 50], start_factor=[1.0, 0.1, 0.5], end_factor=[0.0, 1.0, 0.7]),
        lambda i, optimizer: lr_scheduler.LinearLR(
            optimizer, [1.0, 0.1, 0.5][i], [0.0, 1.0, 0.7][i], total_iters=[5, 10, 50][i]
        ),
    ),
    "polynomial": (
        schedules.polynomial(LR, total_iters=[5, 20, 60], power=[1.0, 2.0, 0.5]),
        lambda i, optimizer: lr_scheduler.PolynomialLR(optimizer, [5, 20, 60][i], [1.0, 2.0, 0.5][i]),
    ),
    "cosine_restarts": (
        schedules.cosine_restarts(LR, T_0=[3, 5, 7], T_mult=[2, 1, 3], eta_min=[0.0, 0.01, 0.2]),
        lambda i, optimizer: lr_scheduler.CosineAnnealingWarmRestarts(
            optimizer, [3, 5, 7][i], [2, 1, 3][i], [0.0, 0.01, 0.2][i]
        ),
    ),
    **{
        f"one_cycle, {shape}{', three phases' * three}": (
            schedules.one_cycle(
                *(LR, [40, 41, 57], [0.3, 0.25, 0.4], shape),
                div_factor=[25, 10, 3],
                final_div_factor=[1e4, 100, 7],
                three_phase=three,
            ),
            lambda i, optimizer, shape=shape, three=three: lr_scheduler.OneCycleLR(
                *(optimizer, LR[i], [40, 41, 57][i]),
                pct_start=[0.3, 0.25, 0.4][i],
                anneal_strategy=shape,
                cycle_momentum=False,
                div_factor=[25, 10, 3][i],
                final_div_factor=[1e4, 100, 7][i],
                three_phase=three,
            ),
        )
        for shape in ("cos", "linear")
        for three in (False, True)
    },
    "chain": (
        schedules.chain(
            schedules.exponential(LR, gamma=[0.9, 0.99, 0.95]), schedules.linear(1.0, [5, 10, 15], [0.5, 0.1, 0.3])
        ),
        lambda i, optimizer: lr_scheduler.ChainedScheduler(
            [
                lr_scheduler.ExponentialLR(optimizer, [0.9, 0.99, 0.95][i]),
                lr_scheduler.LinearLR(optimizer, [0.5, 0.1, 0.3][i], total_iters=[5, 10, 15][i]),
            ]
        ),
    ),
    "warmup of a value": (
        schedules.warmup(LR, steps=[2, 5, 11], start_factor=[0.5, 0.1, 0.3]),
        lambda i, optimizer: lr_scheduler.LinearLR(optimizer, [0.5, 0.1, 0.3][i], total_iters=[2, 5, 11][i]),
    ),
    "warmup of step_lr": (
        schedules.warmup(
            schedules.step_lr(LR, [3, 4, 5], [0.5, 0.6, 0.7]), steps=[2, 5, 11], start_factor=[0.5, 0.1, 0.3]
        ),
        lambda i, optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [
                lr_scheduler.LinearLR(optimizer, [0.5, 0.1, 0.3][i], total_iters=[2, 5, 11][i]),
                lr_scheduler.StepLR(optimizer, [3, 4, 5][i], [0.5, 0.6, 0.7][i]),
            ],
            milestones=[[2, 5, 11][i]],
        ),
    ),
    "warmup of cosine": (
        schedules.warmup(schedules.cosine(LR, [38, 45, 50], [0.0, 0.01, 0.2]), steps=[2, 5, 11]),
        lambda i, optimizer: lr_scheduler.SequentialLR(
            optimizer,
            [
                lr_scheduler.LinearLR(optimizer, 1 / 3, total_iters=[2, 5, 11][i]),
                lr_scheduler.CosineAnnealingLR(optimizer, [38, 45, 50][i], [0.0, 0.01, 0.2][i]),
            ],
            milestones=[[2, 5, 11][i]],
        ),
    ),
}
