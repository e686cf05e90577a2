"""Every refusal of the tool and its exit status.

A message is one line: where, what is wrong, how to mend it. The library raises, the command line prints.
"""


class OasisError(Exception):
    """A refusal that the user can act on; `exit_status` is what the command ends with."""

    exit_status = 3


class InputError(OasisError):
    """Bad input: a file, folder, model, text or setting that cannot be used (exit status 3)."""


class CheckError(OasisError):
    """A check was asked for and did not hold (exit status 1)."""

    exit_status = 1
