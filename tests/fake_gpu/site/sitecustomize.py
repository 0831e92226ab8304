"""Python imports this when it starts: as soon as torch is there, its
operators run on the stand-in.
"""

import importlib.abc
import importlib.util
import sys


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Finds torch as all others would, and puts the stand-in's operators into
    it when it has been loaded.
    """

    def find_spec(self, name, path, target=None):
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        load = spec.loader.exec_module

        def load_both(module):
            load(module)
            from tests.fake_gpu import operators

            operators.install()

        spec.loader.exec_module = load_both
        return spec


sys.meta_path.insert(0, _AfterTorch())
