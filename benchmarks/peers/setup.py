"""Setup of the peers in separate directories.

Each peer has a virtual environment or a directory of jars. It is created once per directory and is
not part of this project's environment.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
KCL_VERSION = "3.5.1"
DELTA_VERSION = "4.4.0"
"""Its Python package chooses Spark 4.2, the newest one that it supports."""
SILENT = ("org.slf4j", "slf4j-nop", "2.0.13")


def kcl_pom(version: str, logger: tuple[str, str, str]) -> str:
    """Return a Maven project that needs the Java KCL.

    Args:
        version: Version of the KCL, or a range of Maven.
        logger: Group, artifact and version of a logger for SLF4J.
    """
    return pom([("software.amazon.kinesis", "amazon-kinesis-client", version), logger])


def pom(parts: list[tuple[str, str, str]]) -> str:
    """Return a Maven project that needs the artifacts: group, artifact and version of each."""
    dependencies = "\n".join(
        f"<dependency><groupId>{group}</groupId><artifactId>{artifact}</artifactId>"
        f"<version>{one}</version></dependency>"
        for group, artifact, one in parts
    )
    return f"""<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>bench</groupId><artifactId>bench</artifactId><version>1</version>
  <dependencies>
{dependencies}
  </dependencies>
</project>
"""


class NotAvailable(Exception):  # noqa: N818 (it is a finding, not a fault)
    """This peer cannot be measured on this machine; the message gives the reason."""


def must(command: list[str], folder: Path) -> None:
    """Run one step of the setup.

    Raises:
        NotAvailable: The command failed.
    """
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )
    if done.returncode:
        text = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
        lines = [line for line in text.splitlines() if line.strip()]
        lines = [line for line in lines if "ERROR" in line][:1] or lines
        raise NotAvailable(
            f"{Path(command[0]).name} failed: {lines[-1][:300] if lines else done.returncode}"
        )


def environment_with(kept: Path, package: str) -> Path:
    """Return the Python executable of a virtual environment that contains the package.

    The environment is created if it does not exist.
    """
    folder = kept / package
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        must([sys.executable, "-m", "venv", str(folder)], kept)
        must([str(python), "-m", "pip", "install", "--quiet", package], kept)
        (folder / "ready").touch()
    return python


def async_kinesis_command(kept: Path, stream: str, kinesis: str) -> list[str]:
    return [
        str(environment_with(kept, "async-kinesis")),
        str(HERE / "async_kinesis_loop.py"),
        stream,
        kinesis,
    ]


def java_kcl_command(kept: Path, stream: str, kinesis: str, dynamodb: str) -> list[str]:
    for tool in ("java", "javac", "mvn"):
        if shutil.which(tool) is None:
            raise NotAvailable(f"there is no {tool} on PATH")
    folder = kept / "java-kcl"
    classes = f"{folder / 'classes'}{os.pathsep}{folder / 'lib'}/*"
    if not (folder / "ready").exists():
        folder.mkdir(exist_ok=True)
        (folder / "pom.xml").write_text(kcl_pom(KCL_VERSION, SILENT))
        must(
            [
                "mvn",
                "-q",
                "-B",
                "dependency:copy-dependencies",
                f"-DoutputDirectory={folder / 'lib'}",
            ],
            folder,
        )
        must(
            [
                "javac",
                "-nowarn",
                "-cp",
                classes,
                "-d",
                str(folder / "classes"),
                str(HERE / "CountingConsumer.java"),
            ],
            folder,
        )
        (folder / "ready").touch()
    return ["java", "-cp", classes, "CountingConsumer", stream, kinesis, dynamodb, "bench-java"]


def structured_streaming_command(kept: Path, folder: Path, size: int) -> list[str]:
    """Return the command of Spark Structured Streaming, with the newest Spark that Delta supports.

    Its jars come from Maven, in the version of the Python package.
    """
    if shutil.which("mvn") is None:
        raise NotAvailable("there is no mvn on PATH")
    python = environment_with(kept, f"delta-spark=={DELTA_VERSION}")
    jars = kept / "delta-jars"
    if not (jars / "ready").exists():
        jars.mkdir(exist_ok=True)
        script = "import pyspark; print('.'.join(pyspark.__version__.split('.')[:2]))"
        spark = subprocess.check_output([str(python), "-c", script], text=True).strip()
        one = ("io.delta", f"delta-spark_{spark}_2.13", DELTA_VERSION)
        (jars / "pom.xml").write_text(pom([one]))
        copy = ["mvn", "-q", "-B", "dependency:copy-dependencies", "-DincludeScope=runtime"]
        must([*copy, f"-DoutputDirectory={jars / 'lib'}"], jars)
        (jars / "ready").touch()
    names = ",".join(str(jar) for jar in sorted((jars / "lib").glob("*.jar")))
    script_file = HERE / "structured_streaming.py"
    return [str(python), str(script_file), str(folder), str(size), names]


def kclpy_command(kept: Path, folder: Path, stream: str, kinesis: str, dynamodb: str) -> list[str]:
    """Return the command of kclpy's Java daemon with a Python record processor.

    The package contains the jars. The daemon and the processor use standard streams.
    """
    python = environment_with(kept, "kclpy-ext")
    jars = next((kept / "kclpy-ext").glob("lib/python*/site-packages/amazon_kclpy/jars"))
    counter = folder / "counted"
    properties = {
        "executableName": f"{python} {HERE / 'kclpy_processor.py'}",
        "streamName": stream,
        "applicationName": "bench-kclpy",
        "AwsCredentialsProvider": "DefaultCredentialsProvider",
        "processingLanguage": "python",
        "initialPositionInStream": "TRIM_HORIZON",
        "retrievalMode": "POLLING",
        "regionName": "us-east-1",
        "kinesisEndpoint": kinesis,
        "dynamoDBEndpoint": dynamodb,
        "maxRecords": "10000",
        "idleTimeBetweenReadsInMillis": "200",
        "failoverTimeMillis": "2000",
        "metricsLevel": "NONE",
    }
    target = folder / "kclpy.properties"
    target.write_text("".join(f"{key} = {value}\n" for key, value in properties.items()))
    daemon = [
        "java",
        "-cp",
        f"{jars}/*",
        "software.amazon.kinesis.multilang.MultiLangDaemon",
        "--properties-file",
        str(target),
    ]
    return [sys.executable, str(HERE / "counted.py"), str(counter), *daemon]


def ours_kclpy_command(folder: Path, stream: str) -> list[str]:
    """Return the command of our worker with kclpy's record processor, its imports changed."""
    counter, script = folder / "counted", folder / "processor.py"
    text = (HERE / "kclpy_processor.py").read_text()
    script.write_text(text.replace("amazon_kclpy", "kcl_pipeline.processors.kclpy"))
    target = folder / "ours.properties"
    properties = {
        "executableName": script.name,
        "streamName": stream,
        "applicationName": "bench-ours-kclpy",
        "initialPositionInStream": "TRIM_HORIZON",
        "retrievalMode": "POLLING",
        "maxRecords": "10000",
        "idleTimeBetweenReadsInMillis": "200",
        "failoverTimeMillis": "2000",
    }
    target.write_text("".join(f"{key} = {value}\n" for key, value in properties.items()))
    worker = [sys.executable, "-m", "kcl_pipeline.cli", "worker", "--properties", str(target)]
    return [sys.executable, str(HERE / "counted.py"), str(counter), *worker]
