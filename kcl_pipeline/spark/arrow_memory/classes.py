"""Load the Java classes of this package into the running session.

The package contains their source text. Janino, which is part of Spark, compiles it. So neither a
jar nor a Java compiler is necessary. The class files are in the session's temporary folder.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
from importlib import resources
from pathlib import Path
from typing import Any, Final

from pyspark.sql import SparkSession

from kcl_pipeline.errors import KclError

SUPPORTED_SPARK: Final = ("4.0", "4.1", "4.2", "4.3")
"""Minor versions of Spark whose interfaces the Java classes use."""
SOURCE_CLASS: Final = "kclpipeline.RecordsInMemory"
RESULT_CLASS: Final = "kclpipeline.ResultInMemory"
_LOADING: Final = threading.Lock()
_ON_THIS_MACHINE: Final = re.compile(r"local(\[[^\]]*\])?")


class UnsuitableSessionError(KclError):
    """The session cannot read Arrow columns in memory. It can read the records in other ways."""


def can_share_memory(session: SparkSession) -> bool:
    """Whether tasks can read this process's memory.

    This needs Linux, a master `local…`, and a session without encryption of temporary data.
    """
    context: Any = session.sparkContext
    return (
        hasattr(os, "memfd_create")
        and _ON_THIS_MACHINE.fullmatch(context.master) is not None
        and not context._encryption_enabled  # noqa: SLF001 (as pyspark)
    )


def java_class(session: SparkSession, name: str) -> Any:
    """A Java class of this package, compiled on the first call (about a second).

    Raises:
        UnsuitableSessionError: The session is not on this machine, or its version is unknown.
        Py4JError: The JVM cannot compile or load the class.
        OSError: The class files cannot be written.
    """
    check_session(session)
    jvm: Any = session.sparkContext._jvm  # noqa: SLF001 (the only way to Spark's class loader)
    with _LOADING:
        loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
        if not _loads(loader, name):
            _add_classes(jvm, loader, session.sparkContext, name)
            loader.loadClass(name)
    return getattr(jvm, name)


def check_session(session: SparkSession) -> None:
    """Check the version and the master.

    Raises:
        UnsuitableSessionError: The session is not on this machine, or its version is unknown.
    """
    if not can_share_memory(session):
        raise UnsuitableSessionError(
            f"tasks of spark.master={session.sparkContext.master} cannot read the memory of this "
            "process. This needs Linux, local[...] and a session without encryption"
        )
    if ".".join(session.version.split(".")[:2]) not in SUPPORTED_SPARK:
        raise UnsuitableSessionError(
            f"Spark {session.version} is not one of the versions {', '.join(SUPPORTED_SPARK)}"
        )


def _loads(loader: Any, name: str) -> bool:
    """Whether the class exists. Its file is looked up, because `loadClass` would raise an error."""
    return loader.getResource(name.replace(".", "/") + ".class") is not None


def _add_classes(jvm: Any, loader: Any, context: Any, class_name: str) -> None:
    source = f"{class_name.rpartition('.')[2]}.java"
    text = resources.files(__package__).joinpath(source).read_text(encoding="utf-8")
    compiler = jvm.org.codehaus.janino.SimpleCompiler()
    compiler.setParentClassLoader(loader)
    compiler.setDebuggingInformation(True, True, True)  # names and lines in stack traces
    compiler.cook(text)
    files = compiler.getBytecodes()
    # Spark removes this folder with the JVM.
    folder = Path(tempfile.mkdtemp(prefix="classes-", dir=context._temp_dir))  # noqa: SLF001
    for name in files:
        path = folder / f"{name.replace('.', '/')}.class"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(files[name]))
    loader.addURL(jvm.java.io.File(str(folder)).toURI().toURL())
