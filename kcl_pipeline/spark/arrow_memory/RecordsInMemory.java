package kclpipeline;

import java.io.IOException;
import java.io.RandomAccessFile;
import java.io.UncheckedIOException;
import java.nio.Buffer;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.MappedByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Collections;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.OptionalLong;
import java.util.Set;
import org.apache.arrow.flatbuf.Message;
import org.apache.arrow.flatbuf.MessageHeader;
import org.apache.arrow.flatbuf.RecordBatch;
import org.apache.arrow.memory.ArrowBuf;
import org.apache.arrow.memory.BufferAllocator;
import org.apache.arrow.memory.OwnershipTransferResult;
import org.apache.arrow.memory.ReferenceManager;
import org.apache.arrow.memory.util.MemoryUtil;
import org.apache.arrow.vector.ValueVector;
import org.apache.arrow.vector.VectorLoader;
import org.apache.arrow.vector.VectorSchemaRoot;
import org.apache.arrow.vector.ipc.message.ArrowRecordBatch;
import org.apache.arrow.vector.ipc.message.MessageSerializer;
import org.apache.arrow.vector.types.pojo.Schema;
import org.apache.spark.TaskContext;
import org.apache.spark.sql.connector.catalog.SupportsRead;
import org.apache.spark.sql.connector.catalog.Table;
import org.apache.spark.sql.connector.catalog.TableCapability;
import org.apache.spark.sql.connector.catalog.TableProvider;
import org.apache.spark.sql.connector.expressions.Transform;
import org.apache.spark.sql.connector.read.Batch;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.connector.read.PartitionReaderFactory;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.ScanBuilder;
import org.apache.spark.sql.connector.read.Statistics;
import org.apache.spark.sql.connector.read.SupportsPushDownRequiredColumns;
import org.apache.spark.sql.connector.read.SupportsReportStatistics;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.util.ArrowUtils;
import org.apache.spark.sql.util.CaseInsensitiveStringMap;
import org.apache.spark.sql.vectorized.ArrowColumnVector;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarBatch;
import org.apache.spark.storage.StorageUtils;
import org.apache.spark.util.TaskCompletionListener;

/**
 * A data source over the records of one batch, which Python keeps in memory files.
 *
 * <p>A file is one partition: 64 bytes with the batch's token, then a stream of Arrow's IPC format.
 * Tasks map the file and read the columns in place. A batch is open from {@link #open} to {@link
 * #release}. A task that starts outside of this time fails, so a DataFrame that is kept never
 * sees the records of another batch, although its path may lead to them. A file stays mapped until
 * the batch is released and its task has ended. Python writes a later batch into it only if {@link
 * #release} returned that no task reads it.
 *
 * <p>Janino compiles this class in the running session. It has no generic types and no lambdas,
 * because Janino does not infer types.
 */
public final class RecordsInMemory implements TableProvider {
  static final int HEADER = 64;
  /** Open batches, by token. */
  private static final Map OPEN = new HashMap();
  private static long mappedBytes = 0;

  /** An open batch. */
  static final class Open {
    /** Mappings of tasks that have ended. */
    final List finished = new ArrayList();
    /** Tasks that have mapped a file and have not ended. */
    int reading = 0;
  }

  /** Start the batch. */
  public static synchronized void open(String token) {
    OPEN.put(token, new Open());
  }

  /**
   * End the batch, and unmap what no task uses.
   *
   * @return the number of tasks that still read. While there is one, the files must not change.
   */
  public static synchronized int release(String token) {
    Open batch = (Open) OPEN.remove(token);
    if (batch == null) return 0;
    for (int i = 0; i < batch.finished.size(); i++)
      unmap((MappedByteBuffer) batch.finished.get(i));
    return batch.reading;
  }

  /** Bytes that are mapped now, for tests. */
  public static synchronized long mappedBytes() {
    return mappedBytes;
  }

  /** Whether an error began in this class, or states that it does not fit. */
  public static boolean caused(Throwable error) {
    String here = "kclpipeline.RecordsInMemory";
    for (int depth = 0; error != null && depth < 20; depth++) {
      String message = error.getMessage();
      if (error instanceof LinkageError && message != null && message.indexOf(here) >= 0)
        return true;
      StackTraceElement[] steps = error.getStackTrace();
      for (int i = 0; i < steps.length; i++)
        if (steps[i].getClassName().startsWith(here)) return true;
      error = error.getCause();
    }
    return false;
  }

  static synchronized MappedByteBuffer map(String path, long size, String token)
      throws IOException {
    String gone =
        "the records of batch " + token + " are not in memory any more. "
            + "Use a DataFrame only while its batch is processed.";
    Open batch = (Open) OPEN.get(token);
    if (batch == null) throw new IOException(gone);
    RandomAccessFile file = new RandomAccessFile(path, "r");
    MappedByteBuffer mapped;
    try {
      FileChannel channel = file.getChannel();
      // A file that was used before may be longer than the records.
      if (channel.size() < size) throw new IOException(cut(token));
      mapped = channel.map(FileChannel.MapMode.READ_ONLY, 0, size);
    } finally {
      file.close();
    }
    mappedBytes += mapped.limit();
    byte[] header = new byte[Math.min(HEADER, mapped.limit())];
    for (int i = 0; i < header.length; i++) header[i] = mapped.get(i);
    if (!new String(header, StandardCharsets.US_ASCII).trim().equals(token)) {
      unmap(mapped);
      throw new IOException(gone);
    }
    mapped.order(ByteOrder.LITTLE_ENDIAN);
    batch.reading++;
    return mapped;
  }

  static synchronized void finished(String token, MappedByteBuffer mapped) {
    Open batch = (Open) OPEN.get(token);
    if (batch == null) {
      unmap(mapped);
    } else {
      batch.finished.add(mapped);
      batch.reading--;
    }
  }

  static String cut(String token) {
    return "the records of batch " + token + " end too early";
  }

  private static void unmap(MappedByteBuffer mapped) {
    mappedBytes -= mapped.limit();
    StorageUtils.dispose(mapped);
  }

  public boolean supportsExternalMetadata() {
    return true;
  }

  public StructType inferSchema(CaseInsensitiveStringMap options) {
    throw new UnsupportedOperationException("the schema must be given");
  }

  public Table getTable(StructType schema, Transform[] partitioning, Map properties) {
    return new Records(
        schema,
        (String) properties.get("token"),
        ((String) properties.get("files")).split(":"),
        ((String) properties.get("sizes")).split(":"),
        Long.parseLong((String) properties.get("rows")));
  }

  /** The records of a batch. */
  static final class Records implements SupportsRead {
    final StructType schema;
    final String token;
    final String[] files;
    final long[] sizes;
    final long rows;
    final long bytes;

    Records(StructType schema, String token, String[] files, String[] sizes, long rows) {
      this.schema = schema;
      this.token = token;
      this.files = files;
      this.sizes = new long[sizes.length];
      long all = 0;
      for (int i = 0; i < sizes.length; i++) all += this.sizes[i] = Long.parseLong(sizes[i]);
      this.rows = rows;
      this.bytes = all;
    }

    public String name() {
      return "records of batch " + token;
    }

    public StructType schema() {
      return schema;
    }

    public Set capabilities() {
      return Collections.singleton(TableCapability.BATCH_READ);
    }

    public ScanBuilder newScanBuilder(CaseInsensitiveStringMap options) {
      return new Columns(this);
    }
  }

  /** Some columns of the records. Equal scans let Spark reuse the result of an exchange. */
  static final class Columns
      implements ScanBuilder, SupportsPushDownRequiredColumns, SupportsReportStatistics, Batch {
    final Records records;
    StructType wanted;

    Columns(Records records) {
      this.records = records;
      this.wanted = records.schema;
    }

    public void pruneColumns(StructType required) {
      wanted = required;
    }

    public Scan build() {
      return this;
    }

    public StructType readSchema() {
      return wanted;
    }

    public String description() {
      return records.name();
    }

    public Batch toBatch() {
      return this;
    }

    public Scan.ColumnarSupportMode columnarSupportMode() {
      return Scan.ColumnarSupportMode.SUPPORTED;
    }

    public Statistics estimateStatistics() {
      return new Size(records.rows, records.bytes);
    }

    public InputPartition[] planInputPartitions() {
      InputPartition[] parts = new InputPartition[records.files.length];
      for (int i = 0; i < parts.length; i++) parts[i] = part(i);
      return parts;
    }

    private Part part(int i) {
      return new Part(records.files[i], records.sizes[i], records.token);
    }

    public PartitionReaderFactory createReaderFactory() {
      return new Readers(wanted.fieldNames());
    }

    public boolean equals(Object other) {
      return other instanceof Columns
          && ((Columns) other).records.token.equals(records.token)
          && ((Columns) other).wanted.equals(wanted);
    }

    public int hashCode() {
      return records.token.hashCode() + wanted.hashCode();
    }
  }

  /** Size of the records, from which Spark chooses the kind of a join. */
  static final class Size implements Statistics {
    final long rows;
    final long bytes;

    Size(long rows, long bytes) {
      this.rows = rows;
      this.bytes = bytes;
    }

    public OptionalLong sizeInBytes() {
      return OptionalLong.of(bytes);
    }

    public OptionalLong numRows() {
      return OptionalLong.of(rows);
    }
  }

  /** One file. */
  static final class Part implements InputPartition {
    final String file;
    final long size;
    final String token;

    Part(String file, long size, String token) {
      this.file = file;
      this.size = size;
      this.token = token;
    }
  }

  /** Creates the reader of a task. */
  static final class Readers implements PartitionReaderFactory {
    final String[] names;

    Readers(String[] names) {
      this.names = names;
    }

    public boolean supportColumnarReads(InputPartition partition) {
      return true;
    }

    public PartitionReader createReader(InputPartition partition) {
      throw new UnsupportedOperationException("the records are read as columns");
    }

    public PartitionReader createColumnarReader(InputPartition partition) {
      try {
        return new Stream((Part) partition, names);
      } catch (IOException error) {
        throw new UncheckedIOException(error);
      }
    }
  }

  /** Reads the record batches of a mapped file. */
  static final class Stream implements PartitionReader, TaskCompletionListener {
    final MappedByteBuffer file;
    final String token;
    final String[] names;
    final BufferAllocator allocator;
    final List roots = new ArrayList();
    int at = HEADER;
    Schema schema;
    ColumnarBatch batch;

    Stream(Part part, String[] names) throws IOException {
      TaskContext task = TaskContext.get();
      if (task == null) throw new IOException("the records can be read only by tasks");
      this.token = part.token;
      this.names = names;
      this.file = map(part.file, part.size, part.token);
      this.allocator =
          ArrowUtils.rootAllocator().newChildAllocator("kinesis records", 0, Long.MAX_VALUE);
      task.addTaskCompletionListener(this);
    }

    /** Free the vectors only now: operators may keep a batch until the task ends. */
    public void onTaskCompletion(TaskContext context) {
      for (int i = 0; i < roots.size(); i++) ((VectorSchemaRoot) roots.get(i)).close();
      roots.clear();
      allocator.close();
      finished(token, file);
    }

    public boolean next() throws IOException {
      while (true) {
        // The stream ends with a size of 0. Without this end, records would be missing.
        if (at + 8 > file.limit() || file.getInt(at) != -1)
          throw new IOException(cut(token));
        int size = file.getInt(at + 4);
        if (size == 0) return false;
        int body = at + 8 + size;
        Message message = Message.getRootAsMessage(slice(at + 8, size));
        at = body + (int) message.bodyLength();
        if (message.headerType() == MessageHeader.Schema) {
          schema = MessageSerializer.deserializeSchema(message);
          continue;
        }
        if (message.headerType() != MessageHeader.RecordBatch)
          throw new IOException("unexpected Arrow message " + message.headerType());
        load(message, body);
        return true;
      }
    }

    private ByteBuffer slice(int start, int size) {
      // Casts, because Janino takes the return types of the first declaration of a method.
      ByteBuffer whole = (ByteBuffer) file.duplicate();
      ((Buffer) whole).position(start);
      ((Buffer) whole).limit(start + size);
      ByteBuffer part = (ByteBuffer) whole.slice();
      part.order(ByteOrder.LITTLE_ENDIAN);
      return part;
    }

    private void load(Message message, int body) throws IOException {
      long length = message.bodyLength();
      ArrowBuf whole =
          new ArrowBuf(MAPPED, null, length, MemoryUtil.getByteBufferAddress(file) + body);
      whole.writerIndex(length);
      ArrowRecordBatch records =
          MessageSerializer.deserializeRecordBatch(
              (RecordBatch) message.header(new RecordBatch()), whole);
      VectorSchemaRoot root = VectorSchemaRoot.create(schema, allocator);
      roots.add(root);
      new VectorLoader(root).load(records);
      ColumnVector[] columns = new ColumnVector[names.length];
      for (int i = 0; i < names.length; i++) columns[i] = new Column(root.getVector(names[i]));
      batch = new ColumnarBatch(columns);
      batch.setNumRows(root.getRowCount());
    }

    public Object get() {
      return batch;
    }

    public void close() {}
  }

  /** A column that is freed with its task. */
  static final class Column extends ArrowColumnVector {
    Column(ValueVector vector) {
      super(vector);
    }

    public void close() {}

    public void closeIfFreeable() {}
  }

  /** Buffers in mapped files, which Arrow does not free. */
  static final ReferenceManager MAPPED =
      new ReferenceManager() {
        public int getRefCount() {
          return 1;
        }

        public boolean release() {
          return false;
        }

        public boolean release(int decrement) {
          return false;
        }

        public void retain() {}

        public void retain(int increment) {}

        public ArrowBuf retain(ArrowBuf buffer, BufferAllocator allocator) {
          return buffer;
        }

        public ArrowBuf deriveBuffer(ArrowBuf buffer, long index, long length) {
          return new ArrowBuf(this, null, length, buffer.memoryAddress() + index);
        }

        public OwnershipTransferResult transferOwnership(
            ArrowBuf buffer, BufferAllocator allocator) {
          throw new UnsupportedOperationException("the records are read-only");
        }

        public BufferAllocator getAllocator() {
          return ArrowUtils.rootAllocator();
        }

        public long getSize() {
          return 0;
        }

        public long getAccountedSize() {
          return 0;
        }
      };
}
