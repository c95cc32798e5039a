/*
 * A fast mock of an OpenAI-compatible inference server: one thread, epoll, HTTP/1.1 keep-alive.
 *
 *   mock_upstream [PORT]          PORT 0 (the default) picks a free one; "listening PORT" is printed when ready.
 *
 *   POST <any path>               A chat completion; a stream of chunks when the body says "stream": true, then a usage
 *                                 chunk when it says "include_usage": true, then [DONE].
 *   GET  /ctl?name=value&...      Sets delay_us (between chunks), first_us (before the first one), chunks (per stream).
 *   GET  /v1/models, else         A model list; {"status":"ok"}.
 *
 * Every chunk is one send() and carries a stamp as its content, so that a client on the same host can tell how long the
 * chunk took and whether any was lost, doubled, reordered or given to the wrong stream:
 *
 *   T <16 hex: CLOCK_MONOTONIC ns> <8 hex: stream> <6 hex: index from 0> <6 hex: number of chunks in the stream>
 *
 * An answer that is not streamed carries one stamp with index 0 of 1.
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

#define MAX_CONNECTIONS 8192
#define INPUT_BYTES (256 * 1024)
#define OUTPUT_HIGH_MARK (64 * 1024) /* a reader this far behind gets no new chunk until it caught up */
#define RETRY_NS 1000000ull
#define MAX_EVENTS 256
#define MAX_CHUNKS 0xffffff

struct connection {
    int fd;
    int streaming;
    int wants_usage;
    int close_after;
    unsigned stream;  /* number of the stream it carries */
    int sent;         /* chunks sent so far */
    int total;        /* chunks of this stream */
    uint64_t due_ns;  /* when the next one leaves */
    int heap_index;   /* place in the heap of due streams, -1 when in none */
    size_t in_bytes;
    char *in;
    size_t out_bytes; /* what the socket did not take yet */
    char *out;
};

static struct connection *connections[MAX_CONNECTIONS];
static struct connection *heap[MAX_CONNECTIONS];
static int heap_size;
static int epoll_fd;

static uint64_t delay_ns, first_ns;
static int chunks_per_stream = 200;
static unsigned next_stream;

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000ull + (uint64_t)t.tv_nsec;
}

/* The heap of streams, earliest due first. */

static void heap_place(int index, struct connection *c)
{
    heap[index] = c;
    c->heap_index = index;
}

static void heap_rise(int index)
{
    struct connection *c = heap[index];
    while (index > 0 && c->due_ns < heap[(index - 1) / 2]->due_ns) {
        heap_place(index, heap[(index - 1) / 2]);
        index = (index - 1) / 2;
    }
    heap_place(index, c);
}

static void heap_sink(int index)
{
    struct connection *c = heap[index];
    for (;;) {
        int child = 2 * index + 1;
        if (child >= heap_size)
            break;
        if (child + 1 < heap_size && heap[child + 1]->due_ns < heap[child]->due_ns)
            child++;
        if (c->due_ns <= heap[child]->due_ns)
            break;
        heap_place(index, heap[child]);
        index = child;
    }
    heap_place(index, c);
}

static void heap_add(struct connection *c)
{
    heap_place(heap_size, c);
    heap_rise(heap_size++);
}

static void heap_remove(struct connection *c)
{
    int index = c->heap_index;
    struct connection *last = heap[--heap_size];
    c->heap_index = -1;
    if (last == c)
        return;
    heap_place(index, last);
    heap_rise(index);
    heap_sink(last->heap_index);
}

/* Connections. Functions below that can find the peer gone return 0 then, and the caller closes. */

static void watch(struct connection *c, uint32_t events)
{
    struct epoll_event event = {.events = events, .data.fd = c->fd};
    epoll_ctl(epoll_fd, EPOLL_CTL_MOD, c->fd, &event);
}

static void close_connection(struct connection *c)
{
    if (c->heap_index >= 0)
        heap_remove(c);
    connections[c->fd] = NULL;
    close(c->fd);
    free(c->in);
    free(c->out);
    free(c);
}

static int write_bytes(struct connection *c, const char *bytes, size_t size)
{
    ssize_t taken = 0;
    if (c->out_bytes == 0) {
        taken = send(c->fd, bytes, size, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (taken < 0) {
            if (errno != EAGAIN)
                return 0;
            taken = 0;
        }
        if ((size_t)taken == size)
            return 1;
        watch(c, EPOLLIN | EPOLLOUT);
    }
    size_t rest = size - (size_t)taken;
    c->out = realloc(c->out, c->out_bytes + rest);
    memcpy(c->out + c->out_bytes, bytes + taken, rest);
    c->out_bytes += rest;
    return 1;
}

static int flush_output(struct connection *c)
{
    ssize_t taken = send(c->fd, c->out, c->out_bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (taken < 0)
        return errno == EAGAIN;
    memmove(c->out, c->out + taken, c->out_bytes - (size_t)taken);
    c->out_bytes -= (size_t)taken;
    if (c->out_bytes == 0)
        watch(c, EPOLLIN);
    return 1;
}

/* Answers. */

static int write_stamp(char *out, size_t size, unsigned stream, int index, int total)
{
    return snprintf(out, size, "T%016llx%08x%06x%06x", (unsigned long long)now_ns(), stream, index, total);
}

static int write_event(struct connection *c, const char *events)
{
    char framed[1400];
    int size = snprintf(framed, sizeof framed, "%zx\r\n%s\r\n", strlen(events), events);
    return write_bytes(c, framed, (size_t)size);
}

static int send_chunk(struct connection *c, int index)
{
    char stamp[64], event[1200];
    const char *role = index == 0 ? "\"role\":\"assistant\"," : "";
    const char *finish = index == c->total - 1 ? "\"stop\"" : "null";
    write_stamp(stamp, sizeof stamp, c->stream, index, c->total);
    snprintf(event, sizeof event,
             "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1763700000,\"model\":\"mock\","
             "\"choices\":[{\"index\":0,\"delta\":{%s\"content\":\"%s\"},\"finish_reason\":%s}]}\n\n",
             role, stamp, finish);
    return write_event(c, event);
}

static int end_stream(struct connection *c)
{
    c->streaming = 0;
    if (c->wants_usage) {
        char event[400];
        snprintf(event, sizeof event,
                 "data: {\"id\":\"chatcmpl-1\",\"object\":\"chat.completion.chunk\",\"created\":1763700000,\"model\":\"mock\","
                 "\"choices\":[],\"usage\":{\"prompt_tokens\":20,\"completion_tokens\":%d,\"total_tokens\":%d}}\n\n",
                 c->total, c->total + 20);
        if (!write_event(c, event))
            return 0;
    }
    return write_event(c, "data: [DONE]\n\n") && write_bytes(c, "0\r\n\r\n", 5);
}

static int step_stream(struct connection *c)
{
    if (!send_chunk(c, c->sent++))
        return 0;
    return c->sent < c->total || end_stream(c);
}

static int start_stream(struct connection *c, int wants_usage)
{
    static const char head[] = "HTTP/1.1 200 OK\r\nserver: mock\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
                               "cache-control: no-cache\r\ntransfer-encoding: chunked\r\n\r\n";
    if (!write_bytes(c, head, sizeof head - 1))
        return 0;
    c->streaming = 1;
    c->wants_usage = wants_usage;
    c->stream = next_stream++;
    c->sent = 0;
    c->total = chunks_per_stream;
    c->due_ns = now_ns() + first_ns;
    heap_add(c);
    return 1;
}

static int send_json(struct connection *c, const char *json)
{
    char out[4096];
    int size = snprintf(out, sizeof out,
                        "HTTP/1.1 200 OK\r\nserver: mock\r\ncontent-type: application/json\r\ncontent-length: %zu\r\n\r\n%s",
                        strlen(json), json);
    return write_bytes(c, out, (size_t)size);
}

static int send_completion(struct connection *c)
{
    char stamp[64], text[800], json[2048];
    size_t size = 0;
    while (size < 700)
        size += (size_t)snprintf(text + size, sizeof text - size, "lorem ipsum dolor ");
    write_stamp(stamp, sizeof stamp, next_stream++, 0, 1);
    snprintf(json, sizeof json,
             "{\"id\":\"chatcmpl-1\",\"object\":\"chat.completion\",\"created\":1763700000,\"model\":\"mock\",\"choices\":[{\"index\":0,"
             "\"message\":{\"role\":\"assistant\",\"content\":\"%s\",\"reasoning_content\":\"%s\"},\"logprobs\":null,\"finish_reason\":\"stop\"}],"
             "\"usage\":{\"prompt_tokens\":20,\"completion_tokens\":200,\"total_tokens\":220}}",
             stamp, text);
    return send_json(c, json);
}

static int read_parameter(const char *query, const char *name, uint64_t *value)
{
    const char *found = strstr(query, name);
    if (found == NULL)
        return 0;
    *value = strtoull(found + strlen(name), NULL, 10);
    return 1;
}

static int answer_control(struct connection *c, const char *query)
{
    uint64_t value;
    if (read_parameter(query, "delay_us=", &value))
        delay_ns = value * 1000;
    if (read_parameter(query, "first_us=", &value))
        first_ns = value * 1000;
    if (read_parameter(query, "chunks=", &value))
        chunks_per_stream = value < 1 ? 1 : value > MAX_CHUNKS ? MAX_CHUNKS : (int)value;
    return send_json(c, "{}");
}

static int answer_get(struct connection *c, const char *path)
{
    if (strncmp(path, "/ctl", 4) == 0)
        return answer_control(c, path);
    if (strncmp(path, "/v1/models", 10) == 0)
        return send_json(c, "{\"object\":\"list\",\"data\":[{\"id\":\"mock\",\"object\":\"model\",\"created\":1763700000,"
                            "\"owned_by\":\"mock\",\"max_model_len\":4096}]}");
    return send_json(c, "{\"status\":\"ok\"}");
}

static int says_true(const char *body, const char *name)
{
    const char *found = strstr(body, name);
    if (found == NULL)
        return 0;
    found += strlen(name);
    while (*found == ' ' || *found == ':')
        found++;
    return strncmp(found, "true", 4) == 0;
}

static int answer_post(struct connection *c, const char *body)
{
    if (says_true(body, "\"stream\""))
        return start_stream(c, says_true(body, "\"include_usage\""));
    return send_completion(c);
}

/* Returns the size of a whole request at the start of the input, body included, or 0 when more must come. */
static size_t measure_request(struct connection *c, size_t *head_bytes)
{
    c->in[c->in_bytes] = 0;
    char *end = strstr(c->in, "\r\n\r\n");
    if (end == NULL)
        return 0;
    *head_bytes = (size_t)(end - c->in) + 4;
    *end = 0;
    const char *length = strcasestr(c->in, "\r\ncontent-length:");
    const char *chunked = strcasestr(c->in, "\r\ntransfer-encoding: chunked");
    c->close_after = strcasestr(c->in, "\r\nconnection: close") != NULL;
    size_t body_bytes = length ? strtoul(length + 17, NULL, 10) : 0;
    *end = '\r';
    if (chunked != NULL) {
        const char *last = strstr(end + 4, "0\r\n\r\n");
        if (last == NULL)
            return 0;
        body_bytes = (size_t)(last + 5 - (end + 4));
    }
    return c->in_bytes < *head_bytes + body_bytes ? 0 : *head_bytes + body_bytes;
}

/* Answers every whole request that has come; one at a time, so a stream holds back what follows it. */
static int answer_requests(struct connection *c)
{
    while (!c->streaming) {
        size_t head_bytes, size = measure_request(c, &head_bytes);
        if (size == 0)
            return c->in_bytes < INPUT_BYTES;
        char kept = c->in[size];
        c->in[size] = 0;
        int ok = strncmp(c->in, "POST", 4) == 0 ? answer_post(c, c->in + head_bytes) : answer_get(c, c->in + 4);
        c->in[size] = kept;
        if (!ok)
            return 0;
        memmove(c->in, c->in + size, c->in_bytes - size);
        c->in_bytes -= size;
        if (c->close_after && !c->streaming && c->out_bytes == 0)
            return 0;
    }
    return 1;
}

/* The event loop. */

static void accept_connections(int listener)
{
    int fd, yes = 1;
    while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        if (fd >= MAX_CONNECTIONS) {
            close(fd);
            continue;
        }
        struct connection *c = calloc(1, sizeof *c);
        c->fd = fd;
        c->heap_index = -1;
        c->in = malloc(INPUT_BYTES + 1);
        connections[fd] = c;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
        struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
        epoll_ctl(epoll_fd, EPOLL_CTL_ADD, fd, &event);
    }
}

static int serve_events(struct connection *c, uint32_t events)
{
    if ((events & EPOLLOUT) && c->out_bytes > 0 && !flush_output(c))
        return 0;
    if (!(events & (EPOLLIN | EPOLLHUP | EPOLLERR)))
        return 1;
    ssize_t got = recv(c->fd, c->in + c->in_bytes, INPUT_BYTES - c->in_bytes, 0);
    if (got < 0 && errno == EAGAIN)
        return 1;
    if (got <= 0)
        return 0;
    c->in_bytes += (size_t)got;
    return answer_requests(c);
}

static int serve_due(struct connection *c, uint64_t now)
{
    heap_remove(c);
    if (c->out_bytes > OUTPUT_HIGH_MARK) {
        c->due_ns = now + RETRY_NS;
        heap_add(c);
        return 1;
    }
    if (!step_stream(c))
        return 0;
    if (c->streaming) {
        c->due_ns = delay_ns ? c->due_ns + delay_ns : now_ns();
        heap_add(c);
        return 1;
    }
    return answer_requests(c) && !(c->close_after && c->out_bytes == 0);
}

static int open_listener(int port)
{
    int yes = 1, fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t size = sizeof address;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes);
    if (bind(fd, (struct sockaddr *)&address, sizeof address) != 0 || listen(fd, 1024) != 0) {
        perror("mock_upstream: cannot listen");
        exit(1);
    }
    getsockname(fd, (struct sockaddr *)&address, &size);
    printf("listening %d\n", ntohs(address.sin_port));
    fflush(stdout);
    return fd;
}

int main(int argc, char **argv)
{
    signal(SIGPIPE, SIG_IGN);
    int listener = open_listener(argc > 1 ? atoi(argv[1]) : 0);
    epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event events[MAX_EVENTS], event = {.events = EPOLLIN, .data.fd = listener};
    epoll_ctl(epoll_fd, EPOLL_CTL_ADD, listener, &event);
    for (;;) {
        struct timespec wait = {1, 0};
        if (heap_size > 0) {
            uint64_t now = now_ns();
            uint64_t left = heap[0]->due_ns > now ? heap[0]->due_ns - now : 0;
            if (left < 1000000000ull)
                wait = (struct timespec){0, (long)left};
        }
        int count = epoll_pwait2(epoll_fd, events, MAX_EVENTS, &wait, NULL);
        for (int i = 0; i < count; i++) {
            int fd = events[i].data.fd;
            if (fd == listener)
                accept_connections(listener);
            else if (connections[fd] != NULL && !serve_events(connections[fd], events[i].events))
                close_connection(connections[fd]);
        }
        uint64_t now = now_ns();
        for (int budget = MAX_EVENTS; budget > 0 && heap_size > 0 && heap[0]->due_ns <= now; budget--) {
            struct connection *c = heap[0];
            if (!serve_due(c, now))
                close_connection(c);
        }
    }
}
