import java.lang.reflect.Method;
import java.net.URI;
import java.nio.charset.StandardCharsets;
import java.time.Duration;
import java.util.ArrayList;
import java.util.HashMap;
import java.util.List;
import java.util.Map;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import software.amazon.awssdk.http.Protocol;
import software.amazon.awssdk.http.nio.netty.NettyNioAsyncHttpClient;
import software.amazon.awssdk.regions.Region;
import software.amazon.awssdk.services.cloudwatch.CloudWatchAsyncClient;
import software.amazon.awssdk.services.dynamodb.DynamoDbAsyncClient;
import software.amazon.awssdk.services.kinesis.KinesisAsyncClient;
import software.amazon.kinesis.common.ConfigsBuilder;
import software.amazon.kinesis.common.InitialPositionInStream;
import software.amazon.kinesis.common.InitialPositionInStreamExtended;
import software.amazon.kinesis.common.StreamConfig;
import software.amazon.kinesis.common.StreamIdentifier;
import software.amazon.kinesis.coordinator.Scheduler;
import software.amazon.kinesis.lifecycle.events.InitializationInput;
import software.amazon.kinesis.lifecycle.events.LeaseLostInput;
import software.amazon.kinesis.lifecycle.events.ProcessRecordsInput;
import software.amazon.kinesis.lifecycle.events.ShardEndedInput;
import software.amazon.kinesis.lifecycle.events.ShutdownRequestedInput;
import software.amazon.kinesis.metrics.NullMetricsFactory;
import software.amazon.kinesis.processor.FormerStreamsLeasesDeletionStrategy;
import software.amazon.kinesis.processor.MultiStreamTracker;
import software.amazon.kinesis.processor.RecordProcessorCheckpointer;
import software.amazon.kinesis.processor.ShardRecordProcessor;
import software.amazon.kinesis.processor.ShardRecordProcessorFactory;
import software.amazon.kinesis.processor.SingleStreamTracker;
import software.amazon.kinesis.retrieval.KinesisClientRecord;
import software.amazon.kinesis.retrieval.fanout.FanOutConfig;
import software.amazon.kinesis.retrieval.polling.PollingConfig;

/**
 * A worker of the Java KCL that prints one line per record, lease event and checkpoint.
 *
 * <p>Arguments are {@code name=value}: application, streams (names, or several stream identifiers,
 * separated by commas), endpoint, worker, consumer (of enhanced fan-out; polling without it) and
 * checkpoint (each, middle or prepare). Names with a dot are settings of the KCL, for example
 * {@code lease.failoverTimeMillis=4000}; a setting that this version does not have is an error.
 * It compiles with every version from 2.7.
 */
public final class InteropWorker {
    static final AtomicLong BATCHES = new AtomicLong();

    static synchronized void print(Object... parts) {
        StringBuilder line = new StringBuilder("@");
        for (Object part : parts) line.append(part == null ? "-" : part.toString()).append(' ');
        System.out.println(line.toString().trim());
        System.out.flush();
    }

    static final class Printer implements ShardRecordProcessor {
        private final String mode;
        private final String stream;
        private String shard;

        Printer(String mode, String stream) {
            this.mode = mode;
            this.stream = stream;
        }

        public void initialize(InitializationInput input) {
            shard = stream.isEmpty() ? input.shardId() : stream + ":" + input.shardId();
            print("initialize", shard, input.extendedSequenceNumber().sequenceNumber(),
                    input.extendedSequenceNumber().subSequenceNumber(),
                    input.pendingCheckpointSequenceNumber() == null
                            ? null : input.pendingCheckpointSequenceNumber().sequenceNumber(),
                    hex(input.pendingCheckpointState()));
        }

        public void processRecords(ProcessRecordsInput input) {
            List<KinesisClientRecord> records = input.records();
            if (records.isEmpty()) return;
            int count = mode.equals("middle") ? middle(records) : records.size();
            long batch = BATCHES.incrementAndGet();
            for (KinesisClientRecord record : records.subList(0, count)) {
                String text = StandardCharsets.UTF_8.decode(record.data()).toString();
                print("record", shard, batch, text.split(" ", 2)[0]);
            }
            KinesisClientRecord last = records.get(count - 1);
            try {
                if (mode.equals("prepare")) {
                    input.checkpointer().prepareCheckpoint(
                            last.sequenceNumber(), last.subSequenceNumber(), new byte[] {1, 2, 3});
                    print("prepared", shard, batch, last.sequenceNumber());
                } else {
                    input.checkpointer().checkpoint(last.sequenceNumber(), last.subSequenceNumber());
                    print("checkpoint", shard, batch, last.sequenceNumber(), last.subSequenceNumber());
                }
                // The rest of the batch is for the next owner.
                if (count < records.size()) Thread.sleep(Long.MAX_VALUE);
            } catch (Exception error) {
                print("refused", shard, batch, error.getClass().getSimpleName());
            }
        }

        private static String hex(byte[] bytes) {
            if (bytes == null) return null;
            StringBuilder text = new StringBuilder();
            for (byte one : bytes) text.append(String.format("%02x", one));
            return text.toString();
        }

        /** Number of records up to the fifth of an aggregate; all if there is no aggregate. */
        private int middle(List<KinesisClientRecord> records) {
            for (int i = 0; i < records.size(); i++) {
                if (records.get(i).aggregated() && records.get(i).subSequenceNumber() == 4) return i + 1;
            }
            return records.size();
        }

        public void leaseLost(LeaseLostInput input) {
            print("lost", shard);
        }

        public void shardEnded(ShardEndedInput input) {
            checkpointEnd(input.checkpointer());
        }

        private void checkpointEnd(RecordProcessorCheckpointer checkpointer) {
            try {
                checkpointer.checkpoint();
                print("ended", shard);
            } catch (Exception error) {
                print("refused", shard, 0, error.getClass().getSimpleName());
            }
        }

        public void shutdownRequested(ShutdownRequestedInput input) {
            print("requested", shard);
        }
    }

    static final class Printers implements ShardRecordProcessorFactory {
        private final String mode;
        private final boolean several;

        Printers(String mode, boolean several) {
            this.mode = mode;
            this.several = several;
        }

        public ShardRecordProcessor shardRecordProcessor() {
            return new Printer(mode, "");
        }

        public ShardRecordProcessor shardRecordProcessor(StreamIdentifier stream) {
            return new Printer(mode, several ? stream.serialize() : "");
        }
    }

    /** The streams, all from the beginning; leases of former streams stay. */
    static final class Streams implements MultiStreamTracker {
        private final List<StreamConfig> streams = new ArrayList<>();

        Streams(String names, InitialPositionInStreamExtended start) {
            for (String one : names.split(",")) {
                streams.add(new StreamConfig(StreamIdentifier.multiStreamInstance(one), start));
            }
        }

        public List<StreamConfig> streamConfigList() {
            return streams;
        }

        public FormerStreamsLeasesDeletionStrategy formerStreamsLeasesDeletionStrategy() {
            return new FormerStreamsLeasesDeletionStrategy.NoLeaseDeletionStrategy();
        }
    }

    /** Call the setter of this name; numbers and booleans are converted to its parameter's type. */
    static void set(Object target, String name, String value) throws Exception {
        for (Method method : target.getClass().getMethods()) {
            if (!method.getName().equals(name) || method.getParameterCount() != 1) continue;
            Class<?> type = method.getParameterTypes()[0];
            method.setAccessible(true);
            if (type == long.class || type == Long.class) method.invoke(target, Long.parseLong(value));
            else if (type == int.class) method.invoke(target, Integer.parseInt(value));
            else if (type == boolean.class) method.invoke(target, Boolean.parseBoolean(value));
            else if (type.isEnum()) {
                for (Object one : type.getEnumConstants()) {
                    if (one.toString().equals(value)) method.invoke(target, one);
                }
            } else continue;
            return;
        }
        throw new IllegalArgumentException("this version has no setting " + name);
    }

    static Object part(Object target, String name) throws Exception {
        Method method = target.getClass().getMethod(name);
        method.setAccessible(true);
        return method.invoke(target);
    }

    public static void main(String[] arguments) throws Exception {
        Map<String, String> given = new HashMap<>();
        for (String one : arguments) given.put(one.split("=", 2)[0], one.split("=", 2)[1]);
        URI endpoint = URI.create(given.get("endpoint"));
        String application = given.get("application");
        String streams = given.get("streams");
        Region region = Region.US_EAST_1;
        boolean fanOut = given.containsKey("consumer");
        NettyNioAsyncHttpClient.Builder http = NettyNioAsyncHttpClient.builder()
                .protocol(fanOut ? Protocol.HTTP2 : Protocol.HTTP1_1).maxConcurrency(256);
        KinesisAsyncClient kinesis = KinesisAsyncClient.builder()
                .region(region).endpointOverride(endpoint).httpClientBuilder(http).build();
        DynamoDbAsyncClient dynamo = DynamoDbAsyncClient.builder()
                .region(region).endpointOverride(endpoint).build();
        CloudWatchAsyncClient cloudWatch = CloudWatchAsyncClient.builder()
                .region(region).endpointOverride(endpoint).build();
        InitialPositionInStreamExtended start = InitialPositionInStreamExtended
                .newInitialPosition(InitialPositionInStream.TRIM_HORIZON);
        boolean several = streams.contains(":");
        Printers printers = new Printers(given.getOrDefault("checkpoint", "each"), several);
        ConfigsBuilder builder = several
                ? new ConfigsBuilder(new Streams(streams, start), application, kinesis, dynamo,
                        cloudWatch, given.get("worker"), printers)
                : new ConfigsBuilder(new SingleStreamTracker(streams, start), application, kinesis,
                        dynamo, cloudWatch, given.get("worker"), printers);
        var leases = builder.leaseManagementConfig();
        var coordinator = builder.coordinatorConfig();
        var retrieval = builder.retrievalConfig();
        for (Map.Entry<String, String> one : given.entrySet()) {
            String[] path = one.getKey().split("\\.", 2);
            if (path.length == 1) continue;
            Object target = switch (path[0]) {
                case "lease" -> leases;
                case "handoff" -> part(leases, "gracefulLeaseHandoffConfig");
                case "metrics" -> part(leases, "workerUtilizationAwareAssignmentConfig");
                case "coordinator" -> coordinator;
                default -> throw new IllegalArgumentException("no settings " + path[0]);
            };
            set(target, path[1], one.getValue());
        }
        if (fanOut) {
            FanOutConfig shared = new FanOutConfig(kinesis).applicationName(application)
                    .consumerName(given.get("consumer"));
            retrieval.retrievalSpecificConfig(several ? shared : shared.streamName(streams));
        } else {
            PollingConfig polling = several
                    ? new PollingConfig(kinesis) : new PollingConfig(streams, kinesis);
            polling.setIdleTimeBetweenReadsInMillis(300);
            retrieval.retrievalSpecificConfig(polling);
        }
        Scheduler scheduler = new Scheduler(builder.checkpointConfig(), coordinator, leases,
                builder.lifecycleConfig(),
                builder.metricsConfig().metricsFactory(new NullMetricsFactory()),
                builder.processorConfig(), retrieval);
        Runtime.getRuntime().addShutdownHook(new Thread(() -> {
            try {
                scheduler.startGracefulShutdown().get(40, TimeUnit.SECONDS);
                print("stopped");
            } catch (Exception error) {
                print("stop-failed", error.getClass().getSimpleName());
            }
        }));
        print("start");
        scheduler.run();
        print("end");
    }
}
