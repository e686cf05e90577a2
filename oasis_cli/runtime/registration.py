"""Makes `import oasis_cli` enough for `AutoModelForCausalLM.from_pretrained`, at no cost for who never calls it.

transformers keeps its quantization methods in a table that a plug-in must enter, and looks for no plug-ins itself.
Entering it needs torch and transformers, seconds that `oasis --help` must not pay. So where transformers is not there
yet, a finder waits in `sys.meta_path` for the module that holds the table, lets it be imported as ever, and then
imports the plug-in.
"""

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

_TABLE: Final = "transformers.quantizers.auto"
_PLUGIN: Final = "oasis_cli.runtime.transformers_plugin"


def register_with_transformers() -> None:
    """Enter the `oasis` method into transformers' table: now if that is loaded, else as soon as it is."""
    if _TABLE in sys.modules:
        importlib.import_module(_PLUGIN)
    elif not any(isinstance(finder, _AwaitTable) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AwaitTable())


class _AwaitTable(MetaPathFinder):
    """Finds nothing itself; sees to it that the plug-in follows the table."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _TABLE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_then_register(module: ModuleType) -> None:
                execute(module)
                importlib.import_module(_PLUGIN)

            spec.loader.exec_module = execute_then_register  # type: ignore[method-assign]
        return spec
