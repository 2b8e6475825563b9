"""What pyproject.toml cannot say: the compiled part of the package.

The native module is compiled where torch can be imported during the build. In pip's isolated build
environment it cannot; there, and without a compiler, the package is installed without the module,
and `python -m distmon.native` compiles it later.
"""

import sys
from importlib.util import find_spec
from pathlib import Path
from runpy import run_path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

HERE = Path(__file__).parent


class BuildNative(build_ext):
    """Compiles through distmon/native/compiling.py, which names the file after torch's version."""

    file_name: str | None = None

    def build_extension(self, ext: Extension) -> None:
        folder = Path(self.get_ext_fullpath(ext.name)).parent
        folder.mkdir(parents=True, exist_ok=True)
        sys.path.insert(0, str(HERE))  # for csrc_triton
        try:
            compiling = run_path(str(HERE / "distmon" / "native" / "compiling.py"))
            self.file_name = compiling["compile_into"](folder).name
        except Exception as error:
            # setuptools makes a warning of this kind of error, because the extension is optional.
            raise CompileError(f"{type(error).__name__}: {error}") from error
        finally:
            sys.path.remove(str(HERE))

    def get_ext_filename(self, fullname: str) -> str:
        """The name that the file has once it is there."""
        usual = super().get_ext_filename(fullname)
        return usual if self.file_name is None else str(Path(usual).with_name(self.file_name))


native = Extension("distmon.native.distmon_native", sources=[], optional=True)

setup(
    ext_modules=[native] if find_spec("torch") is not None else [],
    cmdclass={"build_ext": BuildNative},
)
