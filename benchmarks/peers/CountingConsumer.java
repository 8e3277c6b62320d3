import java.net.URI;
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
import software.amazon.kinesis.coordinator.Scheduler;
import software.amazon.kinesis.lifecycle.events.*;
import software.amazon.kinesis.metrics.NullMetricsFactory;
import software.amazon.kinesis.processor.ShardRecordProcessor;
import software.amazon.kinesis.processor.SingleStreamTracker;
import software.amazon.kinesis.retrieval.polling.PollingConfig;

/** The Java KCL with polling and a processor that counts bytes; prints the records so far. Lease timings are short, so that it starts soon. */
public final class CountingConsumer {
    static final AtomicLong RECORDS = new AtomicLong();
    static final AtomicLong BYTES = new AtomicLong();

    static final class Counter implements ShardRecordProcessor {
        public void initialize(InitializationInput input) {}

        public void processRecords(ProcessRecordsInput input) {
            long bytes = 0;
            for (var record : input.records()) bytes += record.data().remaining();
            BYTES.addAndGet(bytes);
            RECORDS.addAndGet(input.records().size());
        }

        public void leaseLost(LeaseLostInput input) {}

        public void shardEnded(ShardEndedInput input) {}

        public void shutdownRequested(ShutdownRequestedInput input) {}
    }

    public static void main(String[] args) throws Exception {
        String stream = args[0];
        URI kinesisUrl = URI.create(args[1]);
        URI dynamoUrl = URI.create(args[2]);
        Region region = Region.US_EAST_1;
        var http = NettyNioAsyncHttpClient.builder().protocol(Protocol.HTTP1_1).maxConcurrency(512);
        var kinesis = KinesisAsyncClient.builder().region(region).endpointOverride(kinesisUrl).httpClientBuilder(http).build();
        var dynamo = DynamoDbAsyncClient.builder().region(region).endpointOverride(dynamoUrl).build();
        var cloudWatch = CloudWatchAsyncClient.builder().region(region).endpointOverride(dynamoUrl).build();
        var start = InitialPositionInStreamExtended.newInitialPosition(InitialPositionInStream.TRIM_HORIZON);
        var configs = new ConfigsBuilder(new SingleStreamTracker(stream, start), args[3], kinesis, dynamo, cloudWatch, "counter", Counter::new);
        var leases = configs.leaseManagementConfig().failoverTimeMillis(2000).leasesRecoveryAuditorExecutionFrequencyMillis(2000);
        leases.workerUtilizationAwareAssignmentConfig().disableWorkerMetrics(true).workerMetricsReporterFreqInMillis(1000);
        var polling = new PollingConfig(stream, kinesis).maxRecords(10_000);
        polling.setIdleTimeBetweenReadsInMillis(200);
        var scheduler = new Scheduler(
                configs.checkpointConfig(), configs.coordinatorConfig(), leases, configs.lifecycleConfig(),
                configs.metricsConfig().metricsFactory(new NullMetricsFactory()), configs.processorConfig(),
                configs.retrievalConfig().retrievalSpecificConfig(polling));
        var thread = new Thread(scheduler);
        thread.setDaemon(true);
        thread.start();
        while (thread.isAlive()) {
            Thread.sleep(200);
            System.out.println(RECORDS.get());
            System.out.flush();
        }
    }
}
