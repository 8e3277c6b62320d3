package kclpipeline;

import java.io.ByteArrayInputStream;
import java.io.IOException;
import java.io.RandomAccessFile;
import java.nio.ByteBuffer;
import java.nio.channels.Channels;
import java.nio.channels.ClosedByInterruptException;
import java.nio.channels.FileChannel;
import java.nio.charset.StandardCharsets;
import java.util.Collections;
import java.util.HashMap;
import java.util.Iterator;
import java.util.List;
import java.util.Map;
import java.util.concurrent.atomic.AtomicLong;
import org.apache.arrow.memory.BufferAllocator;
import org.apache.arrow.vector.FieldVector;
import org.apache.arrow.vector.VectorSchemaRoot;
import org.apache.arrow.vector.ipc.ArrowStreamWriter;
import org.apache.arrow.vector.ipc.ReadChannel;
import org.apache.arrow.vector.ipc.message.MessageSerializer;
import org.apache.spark.api.java.JavaRDD;
import org.apache.spark.api.java.function.Function2;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.UnsafeProjection;
import org.apache.spark.sql.catalyst.expressions.UnsafeRow;
import org.apache.spark.sql.classic.Dataset;
import org.apache.spark.sql.execution.QueryExecution;
import org.apache.spark.sql.execution.SQLExecution;
import org.apache.spark.sql.execution.arrow.ArrowWriter;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.ArrowUtils;
import scala.Option;
import scala.runtime.AbstractFunction0;

/**
 * Writes the rows of a result into files that Python keeps: a partition becomes a stream of Arrow's
 * IPC format.
 *
 * <p>Each partition has a file in memory and one on the disk. Both begin with 64 bytes that contain
 * the token of the batch. A file in memory may have been used before. Then its old bytes are
 * overwritten. A record batch that does not fit into the bytes by which the files in memory may grow,
 * and what follows it in its task, is written to the disk. A result is open while {@link #run} runs. A task that starts later fails.
 * It never writes to a file of another batch, although its path may lead to it.
 *
 * <p>Janino compiles this class in the running session. It has no generic types and no lambdas,
 * because Janino does not infer types.
 */
public final class ResultInMemory implements Function2 {
  static final int HEADER = 64;
  /** Begins the message of an error of this class, which is not one of the user's function. */
  static final String FAILED = "[kclpipeline.ResultInMemory] ";
  static final String LATE = "the batch of this result has ended";
  /** Open results, by token. */
  private static final Map OPEN = new HashMap();

  final String token;
  final String[] memory;
  final String[] disk;
  final byte[] arrowSchema;
  final StructType schema;
  final int mostRows;
  final long mostBytes;

  ResultInMemory(
      String token,
      String[] memory,
      String[] disk,
      byte[] arrowSchema,
      StructType schema,
      int mostRows,
      long mostBytes) {
    this.token = token;
    this.memory = memory;
    this.disk = disk;
    this.arrowSchema = arrowSchema;
    this.schema = schema;
    this.mostRows = mostRows;
    this.mostBytes = mostBytes;
  }

  /**
   * Evaluate the frame in one job with at most as many partitions as there are files.
   *
   * @param files paths of the files in memory, then of those on the disk, separated by ":"
   * @param mostRows rows of a record batch
   * @param mostBytes bytes after which a record batch ends
   * @param bytesInMemory bytes by which the files in memory may grow
   * @return separated by spaces: the number of tasks that still write (while there is one, the files
   *     must not change), and for each partition its number, and its rows and the end of its stream
   *     in memory and on the disk
   */
  public static String run(
      Object frame,
      String token,
      String files,
      byte[] arrowSchema,
      int mostRows,
      long mostBytes,
      long bytesInMemory) {
    String[] paths = files.split(":");
    int parts = paths.length / 2;
    String[] memory = new String[parts];
    String[] disk = new String[parts];
    System.arraycopy(paths, 0, memory, 0, parts);
    System.arraycopy(paths, parts, disk, 0, parts);
    Dataset dataset = (Dataset) frame;
    ResultInMemory tasks =
        new ResultInMemory(
            token, memory, disk, arrowSchema, dataset.schema(), mostRows, mostBytes);
    QueryExecution execution = dataset.queryExecution();
    Open result = open(token, bytesInMemory);
    String told;
    try {
      // The id lets listeners and the user's observations see the job.
      told = (String)
          SQLExecution.withNewExecutionId(
              execution, Option.apply("kcl_pipeline result"), new Job(execution, tasks));
    } finally {
      release(token);
    }
    return result.writing + " " + told;
  }

  /** An open result. */
  static final class Open {
    /** Bytes by which the files in memory may still grow. */
    final AtomicLong left;
    /** Tasks that have begun to write and have not ended. */
    int writing = 0;

    Open(long bytes) {
      this.left = new AtomicLong(bytes);
    }
  }

  static synchronized Open open(String token, long bytes) {
    Open result = new Open(bytes);
    OPEN.put(token, result);
    return result;
  }

  static synchronized void release(String token) {
    OPEN.remove(token);
  }

  /** A task begins to write. */
  static synchronized Open begin(String token) throws IOException {
    Open result = (Open) OPEN.get(token);
    if (result == null) throw new IOException(LATE);
    result.writing++;
    return result;
  }

  static synchronized void end(Open result) {
    result.writing--;
  }

  /** Whether an error is one of this class, or states that it does not fit. */
  public static boolean caused(Throwable error) {
    for (int depth = 0; error != null && depth < 20; depth++) {
      String message = error.getMessage();
      if (message != null) {
        if (message.startsWith(FAILED)) return true;
        if (error instanceof LinkageError
            && (message.indexOf("kclpipeline") >= 0 || isThrownHere(error))) return true;
      }
      error = error.getCause();
    }
    return false;
  }

  private static boolean isThrownHere(Throwable error) {
    StackTraceElement[] steps = error.getStackTrace();
    return steps.length > 0 && steps[0].getClassName().startsWith("kclpipeline.ResultInMemory");
  }

  /** One task. */
  public Object call(Object index, Object iterator) throws Exception {
    Iterator rows = (Iterator) iterator;
    int number = ((Integer) index).intValue();
    Rows written = new Rows(this, number);
    try {
      while (rows.hasNext()) written.add((InternalRow) rows.next());
      written.end();
    } finally {
      written.close();
    }
    String told = "" + number;
    for (int i = 0; i < written.counts.length; i++) told = told + ":" + written.counts[i];
    return Collections.singletonList(told).iterator();
  }

  /** The job. */
  static final class Job extends AbstractFunction0 {
    final QueryExecution execution;
    final ResultInMemory tasks;

    Job(QueryExecution execution, ResultInMemory tasks) {
      this.execution = execution;
      this.tasks = tasks;
    }

    public Object apply() {
      execution.executedPlan().resetMetrics();
      JavaRDD rows = execution.toRdd().toJavaRDD();
      int most = tasks.memory.length;
      if (rows.getNumPartitions() > most) rows = rows.coalesce(most);
      List told = rows.mapPartitionsWithIndex(tasks, false).collect();
      StringBuilder all = new StringBuilder();
      for (int i = 0; i < told.size(); i++) all.append(told.get(i)).append(' ');
      return all.toString();
    }
  }

  /** Writes the rows of a task. Its files are opened with the first row. */
  static final class Rows {
    final ResultInMemory tasks;
    final int number;
    /** Rows and the end of the stream in memory, and on the disk. */
    final long[] counts = new long[4];
    private BufferAllocator allocator;
    private VectorSchemaRoot root;
    private ArrowWriter vectors;
    private UnsafeProjection unsafe;
    private Open result;
    /** Bytes that the file had before; only more of them count. */
    private long kept;
    private FileChannel file;
    private ArrowStreamWriter stream;
    private boolean isOnDisk = false;
    private int rows = 0;
    private long bytes = 0;

    Rows(ResultInMemory tasks, int number) {
      this.tasks = tasks;
      this.number = number;
    }

    void add(InternalRow row) throws Exception {
      try {
        if (root == null) open();
        UnsafeRow packed;
        if (row instanceof UnsafeRow) {
          packed = (UnsafeRow) row;
        } else {
          if (unsafe == null) unsafe = UnsafeProjection.create(tasks.schema);
          packed = unsafe.apply(row);
        }
        vectors.write(packed);
        rows++;
        bytes += packed.getSizeInBytes();
        if (rows >= tasks.mostRows || bytes >= tasks.mostBytes) flush();
      } catch (Throwable error) {
        throw failed(error);
      }
    }

    void end() throws Exception {
      if (root == null) return;
      try {
        if (rows > 0) flush();
        endStream();
      } catch (Throwable error) {
        throw failed(error);
      }
    }

    void close() throws Exception {
      try {
        if (root != null) root.close();
        if (allocator != null) allocator.close();
        if (file != null) file.close();
      } catch (Throwable error) {
        throw failed(error);
      } finally {
        if (result != null) ResultInMemory.end(result);
        result = null;
      }
    }

    private void open() throws IOException {
      result = begin(tasks.token);
      allocator = ArrowUtils.rootAllocator().newChildAllocator("results", 0, Long.MAX_VALUE);
      root =
          VectorSchemaRoot.create(
              MessageSerializer.deserializeSchema(
                  new ReadChannel(
                      Channels.newChannel(new ByteArrayInputStream(tasks.arrowSchema)))),
              allocator);
      vectors = ArrowWriter.create(root);
      start(tasks.memory[number]);
    }

    private void start(String path) throws IOException {
      file = new RandomAccessFile(path, "rw").getChannel();
      ByteBuffer header = ByteBuffer.allocate(HEADER);
      file.read(header, 0);
      String found = new String(header.array(), StandardCharsets.US_ASCII).trim();
      if (!found.equals(tasks.token)) throw new IOException(LATE);
      kept = file.size();
      // An attempt of this task before may have written. Bytes after the stream are not read.
      file.position(HEADER);
      stream = new ArrowStreamWriter(root, null, file);
      stream.start();
    }

    private void endStream() throws IOException {
      stream.end();
      counts[isOnDisk ? 3 : 1] = file.position();
    }

    private void flush() throws IOException {
      vectors.finish();
      long before = isOnDisk ? 0 : Math.max(file.position(), kept);
      long more = isOnDisk ? 0 : Math.max(file.position() + batchBytes() - before, 0);
      if (more > 0 && result.left.addAndGet(-more) < 0) {
        result.left.addAndGet(more);
        endStream();
        file.close();
        isOnDisk = true;
        start(tasks.disk[number]);
      }
      stream.writeBatch();
      counts[isOnDisk ? 2 : 0] += rows;
      if (!isOnDisk)
        result.left.addAndGet(more - Math.max(file.position() - before, 0));
      vectors.reset();
      rows = 0;
      bytes = 0;
    }

    /** At least the bytes of the record batch in the stream: buffers, their padding, metadata. */
    private long batchBytes() {
      List columns = root.getFieldVectors();
      long all = 1024;
      for (int i = 0; i < columns.size(); i++) all += paddedBytes((FieldVector) columns.get(i));
      return all;
    }

    private static long paddedBytes(FieldVector column) {
      long all = column.getBufferSize() + 256;
      List children = column.getChildrenFromFields();
      for (int i = 0; i < children.size(); i++) all += paddedBytes((FieldVector) children.get(i));
      return all;
    }

    private static Exception failed(Throwable error) {
      if (error instanceof ClosedByInterruptException) return (Exception) error;
      return new IOException(FAILED + error, error);
    }
  }
}
