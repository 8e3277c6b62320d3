"""Evaluate the partitions of a Spark plan in one job that does not fail if partitions do.

A failed task ends its job, so a job finds one failing partition. A failed job costs as much as many
tasks: Spark cancels the running tasks, starts other Python workers for them and evaluates their
rows again. Here each task catches the error of its rows and returns it as rows.

No class in Spark does this, and executors of a cluster may not have classes of this package.
So the code is Java source. Spark compiles it on the executors, as it does with its own generated
code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from py4j.protocol import Py4JError

MAX_CAUSES: Final = 20
_MOST_CHARACTERS: Final = 65_536
"""Of one message. The middle of a longer one is left out."""

# A task that Spark kills or repeats must fail, and so must every attempt but the last.
_SOURCE: Final = """
public Object generate(Object[] references) {
  return new Outcome();
}

final class Outcome extends org.apache.spark.sql.execution.BufferedRowIterator {
  private scala.collection.Iterator rows;
  private int returned = 0;
  private boolean ended = false;

  public void init(int index, scala.collection.Iterator[] inputs) {
    partitionIndex = index;
    rows = inputs[0];
  }

  protected void processNext() throws java.io.IOException {
    if (ended) return;
    ended = true;
    try {
      while (rows.hasNext()) {
        rows.next();
        returned++;
      }
    } catch (Throwable error) {
      if (!(error instanceof Exception || error instanceof StackOverflowError)
          || error instanceof InterruptedException
          || error instanceof org.apache.spark.TaskKilledException
          || error instanceof org.apache.spark.shuffle.FetchFailedException
          || org.apache.spark.TaskContext.get().isInterrupted()
          || org.apache.spark.TaskContext.get().attemptNumber() + 1 < MOST_ATTEMPTS) {
        org.apache.spark.unsafe.Platform.throwException(error);
      }
      Throwable cause = error;
      for (int number = 0; cause != null && number < MOST_CAUSES; number++) {
        String message = cause.getMessage();
        add(cause.getClass().getName(), message == null ? "" : message);
        cause = cause.getCause();
      }
    }
  }

  private void add(String name, String message) {
    if (message.length() > MOST_CHARACTERS) {
      message = message.substring(0, MOST_CHARACTERS / 2) + "\\n...\\n"
          + message.substring(message.length() - MOST_CHARACTERS / 2);
    }
    org.apache.spark.sql.catalyst.expressions.codegen.UnsafeRowWriter writer =
        new org.apache.spark.sql.catalyst.expressions.codegen.UnsafeRowWriter(4, 256);
    writer.reset();
    writer.zeroOutNullBytes();
    writer.write(0, partitionIndex);
    writer.write(1, org.apache.spark.unsafe.types.UTF8String.fromString(name));
    writer.write(2, org.apache.spark.unsafe.types.UTF8String.fromString(message));
    writer.write(3, returned);
    append(writer.getRow().copy());
  }
}
"""


class TaskError(Exception):
    """The error of a task that did not fail.

    Attributes:
        causes: Class and message of the error and of its causes.
        returned: How many rows the transform had returned before the error.
    """

    def __init__(self, causes: list[tuple[str, str]], returned: int) -> None:
        super().__init__(causes[-1][1])
        self.causes = causes
        self.returned = returned


def with_outcomes(gateway: Any, context: Any, rdd: Any, attempts: int) -> Any:
    """Return a Java RDD of the errors of each partition, to read with `errors_of`.

    Args:
        gateway: PySpark's gateway.
        context: The `SparkContext` in the JVM.
        rdd: A `JavaRDD` of Spark's internal rows.
        attempts: How often a task of this session fails before its job does.

    Raises:
        Py4JError: This version of Spark has other interfaces.
    """
    jvm = gateway.jvm
    sql = "org.apache.spark.sql"
    source = _SOURCE
    constants: Mapping[str, int] = {
        "MOST_ATTEMPTS": attempts,
        "MOST_CAUSES": MAX_CAUSES,
        "MOST_CHARACTERS": _MOST_CHARACTERS,
    }
    for name, value in constants.items():
        source = source.replace(name, str(value))
    no_comments = getattr(jvm, "org.apache.spark.api.python.PythonUtils").toScalaMap(
        getattr(jvm, "java.util.HashMap")()
    )
    code = getattr(jvm, f"{sql}.catalyst.expressions.codegen.CodeAndComment")(source, no_comments)
    metric = getattr(jvm, f"{sql}.execution.metric.SQLMetrics").createMetric(context, "probe")
    factory = getattr(jvm, f"{sql}.execution.WholeStageCodegenEvaluatorFactory")
    nothing = gateway.new_array(jvm.Object, 0)
    try:
        made = factory(getattr(jvm, "scala.util.Right")(code), metric, nothing)
    except Py4JError:  # the constructor of Spark 4.0
        made = factory(code, metric, nothing)
    scala_rdd = rdd.rdd()
    return scala_rdd.mapPartitionsWithEvaluator(made, scala_rdd.elementClassTag()).toJavaRDD()


def errors_of(rows: Any) -> dict[int, TaskError]:
    """Return the errors by partition, from the collected rows of `with_outcomes`."""
    errors: dict[int, TaskError] = {}
    for number in range(rows.size()):
        row = rows.get(number)
        partition, cause = int(row.getInt(0)), (str(row.getString(1)), str(row.getString(2)))
        if partition in errors:
            errors[partition].causes.append(cause)
        else:
            errors[partition] = TaskError([cause], int(row.getInt(3)))
    return errors
