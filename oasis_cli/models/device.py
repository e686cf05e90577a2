"""Which device a model runs on."""

import torch

from oasis_cli.errors import InputError


def resolve_device(name: str = "auto", threads: int | None = None) -> torch.device:
    """The device that `name` means here.

    Args:
        name: `auto` (the first accelerator, else the CPU), or a device as torch names it.
        threads: CPU threads for torch; None leaves the count as it is.

    Raises:
        InputError: no such device on this machine.
    """
    if threads is not None:
        torch.set_num_threads(threads)
    if name == "auto":
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return found or torch.device("cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"--device {name}: not to be had on this machine ({reason}); take cpu or auto") from None
    return device
