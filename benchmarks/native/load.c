/*
 * A closed-loop HTTP/1.1 load client for inference APIs: one thread, epoll, one request at a time per connection.
 *
 *   load -p PORT [-u PATH] [-c CONNECTIONS] [-d SECONDS] [-s] [-k KEY] [-m MODEL] [-b PROMPT_BYTES]
 *        [-r RAMP_MS] [-P PERIOD_MS] [-w WARMUP_MS]
 *
 *   -u  whom to ask; what is sent and how a stream has to end is that of the API path (chat, messages, responses)
 *   -s  ask for streams        -r  spread the first requests of the connections over that time
 *   -P  least time between two requests of one connection (0: at once)
 *   -w  leave requests that started in this time out of the percentiles (they still count and are still verified)
 *
 * It starts no request after SECONDS, waits for those that run (DRAIN_S at most) and prints one line of JSON.
 * Times are microseconds. "transit" is how long a chunk took from the mock's send() to our recv(), "ttfb" the time from
 * sending the request (connecting included) to the first chunk, or to the whole answer when it is not a stream.
 *
 * Every chunk carries the stamp that mock_upstream.c describes. Per stream: an index never seen is "lost", one seen twice
 * is "duplicated", one that comes after a later one is "reordered", a chunk of another stream is "foreign". A stream in
 * which the last event of its API never came is "without_done".
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define DRAIN_S 15
#define HEAD_BYTES 16384
#define READ_BYTES (256 * 1024)
#define MAX_EVENTS 256
#define RECONNECT_NS 5000000ull
#define STAMP_DIGITS 36

typedef unsigned long long ull;

/* What is asked on an API path. "body" takes model, prompt and whether to stream. "done" is a word of the event that ends a
 * stream, and of no other; its first character does not come again in it. */
struct surface {
    const char *path, *headers, *body, *done;
};

static const struct surface SURFACES[] = {
    {"/v1/chat/completions", "",
     "{\"model\":\"%s\",\"messages\":[{\"role\":\"system\",\"content\":\"You are a helpful assistant.\"},"
     "{\"role\":\"user\",\"content\":\"%s\"}],\"max_tokens\":256,\"temperature\":0.7,\"stream\":%s}",
     "[DONE]"},
    {"/v1/messages", "anthropic-version: 2023-06-01\r\n",
     "{\"model\":\"%s\",\"max_tokens\":256,\"system\":\"You are a helpful assistant.\","
     "\"messages\":[{\"role\":\"user\",\"content\":\"%s\"}],\"temperature\":0.7,\"stream\":%s}",
     "message_stop"},
    {"/v1/responses", "",
     "{\"model\":\"%s\",\"instructions\":\"You are a helpful assistant.\",\"input\":[{\"type\":\"message\",\"role\":\"user\","
     "\"content\":[{\"type\":\"input_text\",\"text\":\"%s\"}]}],\"max_output_tokens\":256,\"temperature\":0.7,\"stream\":%s}",
     "response.completed"},
};

/* Samples. */

struct samples {
    float *values;
    size_t count, capacity;
};

static void add_sample(struct samples *s, double value)
{
    if (s->count == s->capacity) {
        s->capacity = s->capacity ? s->capacity * 2 : 4096;
        s->values = realloc(s->values, s->capacity * sizeof *s->values);
    }
    s->values[s->count++] = (float)value;
}

static int compare_floats(const void *left, const void *right)
{
    float a = *(const float *)left, b = *(const float *)right;
    return (a > b) - (a < b);
}

static double percentile(const struct samples *s, double q)
{
    return s->count ? (double)s->values[(size_t)(q * (double)(s->count - 1) + 0.5)] : 0.0;
}

/* State. */

enum phase { IDLE, CONNECTING, HEAD, BODY };
enum chunk_phase { SIZE_LINE, CHUNK_DATA, CHUNK_END, TRAILER_START, TRAILER_LINE };

struct connection {
    int fd;
    enum phase phase;
    uint64_t started_ns, next_ns, last_chunk_ns;
    int sampled; /* whether the request started after the warm-up */
    /* response framing */
    int status, chunked, has_length, close_after;
    enum chunk_phase chunk_phase;
    int64_t remaining;
    int head_size;
    char head[HEAD_BYTES];
    /* scanners of the stamp and of the end; both survive a read that ends inside what they look for */
    int quoted, digits, done_matched, done_seen;
    char stamp[STAMP_DIGITS];
    /* what came of this stream */
    int received;
    uint32_t stream;
    int total, highest;
    uint8_t *seen;
    size_t seen_bytes;
};

static int epoll_fd;
static struct sockaddr_in server;
static const struct surface *surface = &SURFACES[0];
static char *request;
static size_t request_size;
static int streaming;
static uint64_t period_ns, warm_ns;
static struct samples ttfb, latency, transit, gap;
static ull answered, bad_status, errors, chunks, reads, connects, without_done;
static ull lost, duplicated, reordered, foreign_chunks;
static int last_bad_status, in_flight;
static char bad_body[300];

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

static double micros(uint64_t from, uint64_t to)
{
    return ((double)to - (double)from) / 1e3;
}

static void watch(struct connection *c, int operation, uint32_t events)
{
    struct epoll_event event = {.events = events, .data.ptr = c};
    epoll_ctl(epoll_fd, operation, c->fd, &event);
}

/* Requests. */

static void send_request(struct connection *c)
{
    /* A request fits a socket buffer; a short or failed send shows as a request that never ends well. */
    ssize_t sent = send(c->fd, request, request_size, MSG_NOSIGNAL);
    (void)sent;
    c->phase = HEAD;
    c->head_size = c->status = c->chunked = c->has_length = c->close_after = 0;
    c->chunk_phase = SIZE_LINE;
    c->remaining = 0;
    c->quoted = c->digits = c->done_matched = c->done_seen = 0;
    c->received = c->total = 0;
    c->highest = -1;
    c->last_chunk_ns = 0;
    watch(c, EPOLL_CTL_MOD, EPOLLIN);
}

static void start_request(struct connection *c)
{
    int yes = 1;
    in_flight++;
    c->started_ns = now_ns();
    c->sampled = c->started_ns >= warm_ns;
    if (c->fd >= 0) {
        send_request(c);
        return;
    }
    connects++;
    c->total = 0;
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    connect(c->fd, (struct sockaddr *)&server, sizeof server);
    watch(c, EPOLL_CTL_ADD, EPOLLOUT);
    c->phase = CONNECTING;
}

static void finish_request(struct connection *c, int whole)
{
    uint64_t now = now_ns();
    in_flight--;
    if (c->total > 0)
        lost += (ull)(c->total - 1 - c->highest);
    if (!whole) {
        errors++;
    } else if (c->status != 200) {
        bad_status++;
        last_bad_status = c->status;
    } else {
        answered++;
        if (c->total == 0)
            lost++; /* an answer without any stamp */
        if (streaming && !c->done_seen)
            without_done++;
        if (c->sampled)
            add_sample(&latency, micros(c->started_ns, now));
    }
    if (!whole || c->close_after) {
        close(c->fd);
        c->fd = -1;
    }
    c->phase = IDLE;
    c->next_ns = c->started_ns + period_ns;
    if (!whole && c->next_ns < now + RECONNECT_NS)
        c->next_ns = now + RECONNECT_NS;
}

/* Verification. */

static uint64_t parse_hex(const char *digits, int count)
{
    uint64_t value = 0;
    for (int i = 0; i < count; i++)
        value = value << 4 | (uint64_t)(digits[i] <= '9' ? digits[i] - '0' : digits[i] - 'a' + 10);
    return value;
}

static void begin_stream(struct connection *c, uint32_t stream, int total)
{
    size_t need = (size_t)total / 8 + 1;
    c->stream = stream;
    c->total = total;
    if (need > c->seen_bytes) {
        c->seen = realloc(c->seen, need);
        c->seen_bytes = need;
    }
    memset(c->seen, 0, need);
}

static void note_index(struct connection *c, int index)
{
    uint8_t bit = (uint8_t)(1 << (index & 7));
    if (c->seen[index >> 3] & bit) {
        duplicated++;
        return;
    }
    c->seen[index >> 3] |= bit;
    if (index > c->highest) {
        lost += (ull)(index - c->highest - 1);
        c->highest = index;
    } else { /* counted as lost when a later one overtook it */
        lost--;
        reordered++;
    }
}

static void take_stamp(struct connection *c, uint64_t now)
{
    uint64_t sent_ns = parse_hex(c->stamp, 16);
    uint32_t stream = (uint32_t)parse_hex(c->stamp + 16, 8);
    int index = (int)parse_hex(c->stamp + 24, 6), total = (int)parse_hex(c->stamp + 30, 6);
    chunks++;
    c->received++;
    if (c->total == 0 && total > 0)
        begin_stream(c, stream, total);
    if (stream != c->stream || total != c->total || index >= total)
        foreign_chunks++;
    else
        note_index(c, index);
    if (c->sampled) {
        add_sample(&transit, micros(sent_ns, now));
        if (c->received == 1)
            add_sample(&ttfb, micros(c->started_ns, now));
        if (c->last_chunk_ns)
            add_sample(&gap, micros(c->last_chunk_ns, now));
    }
    c->last_chunk_ns = now;
}

/* Looks for "T<36 hex>" in quotes. */
static void scan_stamp(struct connection *c, char x, uint64_t now)
{
    if (!c->quoted) {
        c->quoted = x == '"';
        c->digits = -1; /* the T is still missing */
    } else if (c->digits < 0) {
        if (x == 'T')
            c->digits = 0;
        else
            c->quoted = x == '"';
    } else if (c->digits < STAMP_DIGITS && ((x >= '0' && x <= '9') || (x >= 'a' && x <= 'f'))) {
        c->stamp[c->digits++] = x;
    } else {
        if (x == '"' && c->digits == STAMP_DIGITS)
            take_stamp(c, now);
        c->quoted = x == '"';
        c->digits = -1;
    }
}

static void scan_body(struct connection *c, const char *bytes, size_t size, uint64_t now)
{
    const char *done = surface->done;
    if (c->status != 200) {
        if (bad_body[0] == 0)
            snprintf(bad_body, sizeof bad_body, "%.*s", (int)(size > 280 ? 280 : size), bytes);
        return;
    }
    for (size_t i = 0; i < size; i++) {
        char x = bytes[i];
        c->done_matched = x == done[c->done_matched] ? c->done_matched + 1 : x == done[0];
        if (done[c->done_matched] == 0) {
            c->done_seen = 1;
            c->done_matched = 0;
        }
        scan_stamp(c, x, now);
    }
}

/* Response framing. The feed functions return 1 when the response is whole, 0 when more must come, -1 when it is broken. */

static int hex_digit(char x)
{
    if (x >= '0' && x <= '9')
        return x - '0';
    x |= 32;
    return x >= 'a' && x <= 'f' ? x - 'a' + 10 : -1;
}

static int feed_chunked(struct connection *c, const char *bytes, size_t size, uint64_t now)
{
    size_t i = 0;
    while (i < size) {
        switch (c->chunk_phase) {
        case SIZE_LINE: {
            char x = bytes[i++];
            int digit = hex_digit(x);
            if (digit >= 0)
                c->remaining = c->remaining * 16 + digit;
            else if (x == '\n')
                c->chunk_phase = c->remaining ? CHUNK_DATA : TRAILER_START;
            else if (x != '\r')
                return -1;
            break;
        }
        case CHUNK_DATA: {
            size_t part = size - i < (size_t)c->remaining ? size - i : (size_t)c->remaining;
            scan_body(c, bytes + i, part, now);
            i += part;
            c->remaining -= (int64_t)part;
            if (c->remaining == 0)
                c->chunk_phase = CHUNK_END;
            break;
        }
        case CHUNK_END:
            if (bytes[i++] == '\n')
                c->chunk_phase = SIZE_LINE;
            break;
        case TRAILER_START:
            if (bytes[i] == '\n')
                return 1;
            c->chunk_phase = bytes[i++] == '\r' ? TRAILER_START : TRAILER_LINE;
            break;
        case TRAILER_LINE:
            if (bytes[i++] == '\n')
                c->chunk_phase = TRAILER_START;
            break;
        }
    }
    return 0;
}

static int feed_body(struct connection *c, const char *bytes, size_t size, uint64_t now)
{
    if (c->chunked)
        return feed_chunked(c, bytes, size, now);
    scan_body(c, bytes, size, now);
    if (!c->has_length)
        return 0;
    c->remaining -= (int64_t)size;
    return c->remaining <= 0;
}

/* Collects the head; sets *used to the bytes it took. */
static int feed_head(struct connection *c, const char *bytes, size_t size, size_t *used)
{
    int before = c->head_size;
    size_t room = (size_t)(HEAD_BYTES - 1 - before), part = size < room ? size : room;
    memcpy(c->head + before, bytes, part);
    c->head_size += (int)part;
    c->head[c->head_size] = 0;
    char *end = strstr(c->head + (before > 3 ? before - 3 : 0), "\r\n\r\n");
    *used = part;
    if (end == NULL)
        return part < size ? -1 : 0;
    *used = (size_t)(end - c->head) + 4 - (size_t)before;
    *end = 0;
    c->status = atoi(c->head + 9);
    c->chunked = strcasestr(c->head, "\ntransfer-encoding: chunked") != NULL;
    const char *length = strcasestr(c->head, "\ncontent-length:");
    if (length != NULL && !c->chunked) {
        c->has_length = 1;
        c->remaining = atoll(length + 16);
    }
    c->close_after = strcasestr(c->head, "\nconnection: close") != NULL;
    c->phase = BODY;
    return c->has_length && c->remaining == 0;
}

static int feed(struct connection *c, const char *bytes, size_t size, uint64_t now)
{
    if (c->phase == HEAD) {
        size_t used;
        int outcome = feed_head(c, bytes, size, &used);
        if (outcome != 0 || c->phase == HEAD || used == size)
            return outcome;
        bytes += used;
        size -= used;
    }
    return feed_body(c, bytes, size, now);
}

static void serve_event(struct connection *c)
{
    static char buffer[READ_BYTES];
    if (c->fd < 0)
        return;
    if (c->phase == CONNECTING) {
        int error = 0;
        socklen_t size = sizeof error;
        getsockopt(c->fd, SOL_SOCKET, SO_ERROR, &error, &size);
        if (error)
            finish_request(c, 0);
        else
            send_request(c);
        return;
    }
    ssize_t got = recv(c->fd, buffer, sizeof buffer, 0);
    uint64_t now = now_ns();
    if (got < 0 && errno == EAGAIN)
        return;
    if (c->phase == IDLE) { /* the server closed an idle connection, or sent what nobody asked for */
        if (got > 0)
            errors++;
        close(c->fd);
        c->fd = -1;
        return;
    }
    if (got <= 0) {
        int until_close = got == 0 && c->phase == BODY && !c->chunked && !c->has_length;
        c->close_after = 1;
        finish_request(c, until_close);
        return;
    }
    reads++;
    int outcome = feed(c, buffer, (size_t)got, now);
    if (outcome != 0)
        finish_request(c, outcome > 0);
}

/* Start and report. */

struct options {
    int port, connections, ramp_ms, prompt_bytes;
    double seconds, warmup_ms, period_ms;
    const char *path, *key, *model;
};

static void build_request(const struct options *o)
{
    static const char words[] = "the quick brown fox ";
    char *prompt = malloc((size_t)o->prompt_bytes + 1), *body;
    for (size_t i = 0; i < sizeof SURFACES / sizeof *SURFACES; i++)
        if (strcmp(o->path, SURFACES[i].path) == 0)
            surface = &SURFACES[i];
    for (int i = 0; i < o->prompt_bytes; i++)
        prompt[i] = words[i % 20];
    prompt[o->prompt_bytes] = 0;
    int body_size = asprintf(&body, surface->body, o->model, prompt, streaming ? "true" : "false");
    request_size = (size_t)asprintf(&request,
                                    "POST %s HTTP/1.1\r\nHost: 127.0.0.1:%d\r\nAuthorization: Bearer %s\r\n"
                                    "Content-Type: application/json\r\nAccept: */*\r\nUser-Agent: muster-bench/1\r\n"
                                    "%sContent-Length: %d\r\n\r\n%s",
                                    o->path, o->port, o->key, surface->headers, body_size, body);
    free(prompt);
    free(body);
}

static void print_samples(const char *name, struct samples *s)
{
    if (s->count)
        qsort(s->values, s->count, sizeof *s->values, compare_floats);
    printf("\"%s_us\":{\"count\":%zu,\"p50\":%.1f,\"p95\":%.1f,\"p99\":%.1f,\"max\":%.1f},", name, s->count, percentile(s, 0.5),
           percentile(s, 0.95), percentile(s, 0.99), percentile(s, 1.0));
}

static void print_report(double elapsed_s)
{
    for (char *p = bad_body; *p; p++)
        if (*p == '"' || *p == '\\' || (unsigned char)*p < ' ' || (unsigned char)*p > '~')
            *p = '\'';
    printf("{\"answered\":%llu,\"bad_status\":%llu,\"last_bad_status\":%d,\"errors\":%llu,\"stuck\":%d,", answered, bad_status,
           last_bad_status, errors, in_flight);
    printf("\"chunks\":%llu,\"reads\":%llu,\"connects\":%llu,\"without_done\":%llu,", chunks, reads, connects, without_done);
    printf("\"lost\":%llu,\"duplicated\":%llu,\"reordered\":%llu,\"foreign\":%llu,", lost, duplicated, reordered, foreign_chunks);
    print_samples("ttfb", &ttfb);
    print_samples("latency", &latency);
    print_samples("transit", &transit);
    print_samples("gap", &gap);
    printf("\"elapsed_s\":%.4f,\"bad_body\":\"%s\"}\n", elapsed_s, bad_body);
}

static struct options read_options(int argc, char **argv)
{
    struct options o = {.connections = 1, .prompt_bytes = 400, .seconds = 3, .path = "/v1/chat/completions", .key = "none", .model = "mock"};
    int option;
    while ((option = getopt(argc, argv, "p:u:c:d:sk:m:b:r:P:w:")) > 0) {
        switch (option) {
        case 'p': o.port = atoi(optarg); break;
        case 'u': o.path = optarg; break;
        case 'c': o.connections = atoi(optarg); break;
        case 'd': o.seconds = atof(optarg); break;
        case 's': streaming = 1; break;
        case 'k': o.key = optarg; break;
        case 'm': o.model = optarg; break;
        case 'b': o.prompt_bytes = atoi(optarg); break;
        case 'r': o.ramp_ms = atoi(optarg); break;
        case 'P': o.period_ms = atof(optarg); break;
        case 'w': o.warmup_ms = atof(optarg); break;
        default: exit(2);
        }
    }
    if (o.port <= 0 || o.connections <= 0 || o.prompt_bytes < 0) {
        fprintf(stderr, "load: -p PORT is needed, -c and -b must be positive\n");
        exit(2);
    }
    return o;
}

/* Starts what is due and returns when something is due next; UINT64_MAX when all work is done. */
static uint64_t start_due(struct connection *all, int count, uint64_t now, uint64_t end_ns)
{
    uint64_t next = now + 500000000ull;
    if (now >= end_ns)
        return in_flight ? next : UINT64_MAX;
    if (end_ns < next)
        next = end_ns;
    for (int i = 0; i < count; i++) {
        if (all[i].phase != IDLE)
            continue;
        if (all[i].next_ns <= now)
            start_request(&all[i]);
        else if (all[i].next_ns < next)
            next = all[i].next_ns;
    }
    return next;
}

int main(int argc, char **argv)
{
    signal(SIGPIPE, SIG_IGN);
    struct options o = read_options(argc, argv);
    build_request(&o);
    server = (struct sockaddr_in){
        .sin_family = AF_INET, .sin_port = htons((uint16_t)o.port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    epoll_fd = epoll_create1(0);
    struct connection *all = calloc((size_t)o.connections, sizeof *all);
    uint64_t begin = now_ns(), end_ns = begin + (uint64_t)(o.seconds * 1e9), deadline = end_ns + DRAIN_S * 1000000000ull;
    period_ns = (uint64_t)(o.period_ms * 1e6);
    warm_ns = begin + (uint64_t)(o.warmup_ms * 1e6);
    for (int i = 0; i < o.connections; i++) {
        all[i].fd = -1;
        all[i].next_ns = begin + (uint64_t)o.ramp_ms * 1000000ull * (uint64_t)i / (uint64_t)o.connections;
    }
    struct epoll_event events[MAX_EVENTS];
    for (;;) {
        uint64_t now = now_ns(), next = start_due(all, o.connections, now, end_ns);
        if (next == UINT64_MAX || now > deadline)
            break;
        now = now_ns();
        uint64_t left = next > now ? next - now : 0;
        struct timespec wait = {(time_t)(left / 1000000000ull), (long)(left % 1000000000ull)};
        int count = epoll_pwait2(epoll_fd, events, MAX_EVENTS, &wait, NULL);
        for (int i = 0; i < count; i++)
            serve_event(events[i].data.ptr);
    }
    print_report((double)(now_ns() - begin) / 1e9);
    return 0;
}
