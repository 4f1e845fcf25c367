/*
 * A NIC in software, for tests: what UCX's rc_verbs calls of libibverbs, between processes of one machine.
 *
 * A port is a socket in the folder SOFTWARE_NIC, and the socket's name is the port's LID. A queue pair connects to its
 * peer's port, and first sends the peer's number and a descriptor of its own process's memory (/proc/self/mem). Each SEND
 * is then a packet, received into the buffers of the shared receive queue. RDMA reads and writes go through the peer's
 * descriptor, in any namespace. Everything moves in calls of the one thread that owns the context; only asynchronous
 * events are read by another.
 *
 * Requests of a queue pair complete in order, a SEND once the peer has taken it from the socket. A peer that is gone, and
 * a port that is down, fail those under way and all later ones: retries are exhausted. The file <device>.down in that
 * folder takes the ports of all devices of this name down. SOFTWARE_NIC_LIMIT bounds the length of memory
 * that may be registered at once. Keys of memory are not checked.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <linux/sockios.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <sys/un.h>
#include <unistd.h>

#undef ibv_query_port
#define NUM_DEVICES 2
#define MAX_SGE 16

struct device {
    struct ibv_device ibv;
    void *of_private_headers[8];
};
struct request {
    struct request *next;
    struct ibv_wc end;
    int is_signaled, is_sent;
    size_t nbytes;
    char bytes[];
};
struct cq {
    struct ibv_cq ibv;
    struct ibv_wc *wcs;
    unsigned first, last, size;
    struct cq *next;
};
struct srq {
    struct ibv_srq ibv;
    struct ibv_sge *sges;
    uint64_t *ids;
    unsigned first, last, size;
};
struct qp {
    struct ibv_qp ibv;
    struct ibv_qp_cap cap;
    struct ibv_qp_attr peer;
    int fd, memory, is_dead; /* memory: of the peer's process, -1 until it has connected */
    struct request *first, **last;
    struct qp *next;
};
struct connection {
    int fd;
    struct qp *qp;
    struct connection *next;
};
struct context {
    struct ibv_context ibv;
    int lid, listening, epoll, completed, timer, events;
    char path[108];
    struct cq *cqs;
    struct qp *qps;
    struct connection *connections;
};

static struct device devices[NUM_DEVICES];
static uint32_t next_qp = 1;

static void watch(struct context *context, int fd)
{
    struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};
    epoll_ctl(context->epoll, EPOLL_CTL_ADD, fd, &event);
}

static void complete(struct ibv_cq *ibv_cq, struct ibv_wc wc)
{
    struct cq *cq = (struct cq *)ibv_cq;
    if (cq->last - cq->first == cq->size)
        abort(); /* UCX counts its requests */
    cq->wcs[cq->last++ % cq->size] = wc;
    eventfd_write(((struct context *)ibv_cq->context)->completed, 1);
}

static int is_down(struct ibv_context *context)
{
    char file[128];
    snprintf(file, sizeof(file), "%s/%s.down", getenv("SOFTWARE_NIC"), context->device->name);
    return !access(file, F_OK);
}

/* -- moving bytes -- */

/* Send what can be sent, and complete what the peer has taken; look again after 2 ms if it has not. */
static void advance(struct qp *qp)
{
    struct itimerspec soon = {.it_value.tv_nsec = 2000000};
    int untaken = 0;
    if (!qp->first)
        return;
    timerfd_settime(((struct context *)qp->ibv.context)->timer, 0, &soon, NULL);
    if (!qp->is_dead && is_down(qp->ibv.context))
        qp->is_dead = 1;
    for (struct request *each = qp->first; each && !qp->is_dead; each = each->next) {
        if (!each->is_sent && send(qp->fd, each->bytes, each->nbytes, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
            qp->is_dead = errno != EAGAIN;
            break;
        }
        each->is_sent = 1;
    }
    if (!qp->is_dead && (ioctl(qp->fd, SIOCOUTQ, &untaken) || untaken || !qp->first->is_sent))
        return;
    while (qp->first && (qp->first->is_sent || qp->is_dead)) {
        struct request *request = qp->first;
        if (qp->is_dead)
            request->end.status = qp->is_dead++ == 1 ? IBV_WC_RETRY_EXC_ERR : IBV_WC_WR_FLUSH_ERR;
        if (request->is_signaled || qp->is_dead)
            complete(qp->ibv.send_cq, request->end);
        if (!(qp->first = request->next))
            qp->last = &qp->first;
        free(request);
    }
}

/* The first packet of a connection: a number, and a descriptor. */
static ssize_t exchange(int fd, uint32_t *number, int *descriptor, ssize_t (*call)(int, struct msghdr *, int))
{
    char control[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec iov = {number, sizeof(*number)};
    struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control)};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    ssize_t nbytes;
    *header = (struct cmsghdr){CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
    memcpy(CMSG_DATA(header), descriptor, sizeof(int));
    nbytes = call(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL | MSG_CMSG_CLOEXEC);
    memcpy(descriptor, CMSG_DATA(header), sizeof(int));
    return nbytes;
}

static ssize_t send_message(int fd, struct msghdr *message, int flags) { return sendmsg(fd, message, flags); }

static int greet(struct context *context, struct connection *from)
{
    uint32_t number;
    int memory;
    if (exchange(from->fd, &number, &memory, recvmsg) != sizeof(number))
        return 0;
    for (struct qp *qp = context->qps; qp; qp = qp->next)
        if (qp->ibv.qp_num == number) {
            qp->memory = memory;
            from->qp = qp;
        }
    return from->qp != NULL;
}

static void receive(struct context *context, struct connection *from)
{
    for (;;) {
        if (!from->qp && !greet(context, from))
            return;
        struct srq *srq = (struct srq *)from->qp->ibv.srq;
        if (srq->first == srq->last)
            return;
        struct ibv_sge sge = srq->sges[srq->first % srq->size];
        ssize_t nbytes = recv(from->fd, (void *)sge.addr, sge.length, MSG_DONTWAIT);
        if (nbytes <= 0) {
            if (nbytes == 0 || errno != EAGAIN) {
                epoll_ctl(context->epoll, EPOLL_CTL_DEL, from->fd, NULL);
                close(from->fd);
                from->fd = -1;
            }
            return;
        }
        complete(from->qp->ibv.recv_cq,
                 (struct ibv_wc){.wr_id = srq->ids[srq->first++ % srq->size],
                                 .opcode = IBV_WC_RECV,
                                 .byte_len = nbytes,
                                 .qp_num = from->qp->ibv.qp_num});
    }
}

static void progress(struct context *context)
{
    uint64_t expirations;
    int fd;
    (void)!read(context->timer, &expirations, sizeof(expirations));
    while ((fd = accept4(context->listening, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC)) >= 0) {
        struct connection *connection = calloc(1, sizeof(*connection));
        *connection = (struct connection){fd, NULL, context->connections};
        context->connections = connection;
        watch(context, fd);
    }
    for (struct connection *each = context->connections; each; each = each->next)
        if (each->fd >= 0 && !is_down(&context->ibv))
            receive(context, each);
    for (struct qp *qp = context->qps; qp; qp = qp->next)
        advance(qp);
}

static int poll_cq(struct ibv_cq *ibv_cq, int count, struct ibv_wc *wcs)
{
    struct cq *cq = (struct cq *)ibv_cq;
    struct context *context = (struct context *)ibv_cq->context;
    int found = 0, is_empty = 1;
    eventfd_t value;
    progress(context);
    while (found < count && cq->first != cq->last)
        wcs[found++] = cq->wcs[cq->first++ % cq->size];
    for (struct cq *each = context->cqs; each; each = each->next)
        is_empty &= each->first == each->last;
    if (is_empty)
        eventfd_read(context->completed, &value);
    return found;
}

static int req_notify_cq(struct ibv_cq *cq, int solicited_only)
{
    return 0; /* the channel's descriptor is readable while there is something to poll */
}

static int post_srq_recv(struct ibv_srq *ibv_srq, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
    struct srq *srq = (struct srq *)ibv_srq;
    for (; wr; wr = wr->next) {
        if (srq->last - srq->first == srq->size) {
            *bad = wr;
            return ENOMEM;
        }
        srq->sges[srq->last % srq->size] = wr->sg_list[0];
        srq->ids[srq->last++ % srq->size] = wr->wr_id;
    }
    return 0;
}

static void post(struct qp *qp, struct ibv_send_wr *wr)
{
    struct iovec here[MAX_SGE];
    ssize_t total = 0, moved;
    char byte;
    for (int i = 0; i < wr->num_sge; total += here[i++].iov_len)
        here[i] = (struct iovec){(void *)wr->sg_list[i].addr, wr->sg_list[i].length};
    struct request *request = calloc(1, sizeof(*request) + total);
    request->end = (struct ibv_wc){.wr_id = wr->wr_id, .qp_num = qp->ibv.qp_num};
    request->is_signaled = wr->send_flags & IBV_SEND_SIGNALED;
    request->is_sent = wr->opcode != IBV_WR_SEND;
    *qp->last = request;
    qp->last = &request->next;
    if (wr->opcode == IBV_WR_SEND) {
        for (int i = 0; i < wr->num_sge; request->nbytes += here[i++].iov_len)
            memcpy(request->bytes + request->nbytes, here[i].iov_base, here[i].iov_len);
    } else if (qp->is_dead || is_down(qp->ibv.context)) {
        ;
    } else if (!total) { /* asks if the peer is there */
        qp->is_dead |= !recv(qp->fd, &byte, 1, MSG_DONTWAIT | MSG_PEEK);
    } else {
        request->end.opcode = wr->opcode == IBV_WR_RDMA_READ ? IBV_WC_RDMA_READ : IBV_WC_RDMA_WRITE;
        if (qp->memory < 0)
            progress((struct context *)qp->ibv.context);
        moved = wr->opcode == IBV_WR_RDMA_READ ? preadv(qp->memory, here, wr->num_sge, wr->wr.rdma.remote_addr)
                                               : pwritev(qp->memory, here, wr->num_sge, wr->wr.rdma.remote_addr);
        qp->is_dead |= moved != total;
    }
    advance(qp);
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
    for (; wr; wr = wr->next)
        post((struct qp *)qp, wr);
    return 0;
}

/* -- devices -- */

struct ibv_device **ibv_get_device_list(int *count)
{
    struct ibv_device **list = calloc(NUM_DEVICES + 1, sizeof(*list));
    *count = NUM_DEVICES;
    for (int i = 0; i < NUM_DEVICES; i++) {
        struct ibv_device *device = list[i] = &devices[i].ibv;
        device->node_type = IBV_NODE_CA;
        device->transport_type = IBV_TRANSPORT_IB;
        sprintf(device->name, "soft_%d", i);
        sprintf(device->dev_name, "uverbs%d", i);
    }
    return list;
}

void ibv_free_device_list(struct ibv_device **list) { free(list); }
const char *ibv_get_device_name(struct ibv_device *device) { return device->name; }
int ibv_get_device_index(struct ibv_device *device) { return device->name[5] - '0'; }
const char *ibv_wc_status_str(enum ibv_wc_status status)
{
    return status == IBV_WC_RETRY_EXC_ERR ? "retries exhausted" : "flushed";
}
int ibv_fork_init(void) { return 0; }
enum ibv_fork_status ibv_is_fork_initialized(void) { return IBV_FORK_UNNEEDED; }

struct ibv_context *ibv_open_device(struct ibv_device *device)
{
    struct context *context = calloc(1, sizeof(*context));
    struct sockaddr_un name = {AF_UNIX};
    int events[2];
    context->listening = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    do
        snprintf(name.sun_path, sizeof(name.sun_path), "%s/%d", getenv("SOFTWARE_NIC"), ++context->lid);
    while (bind(context->listening, (void *)&name, sizeof(name)) && errno == EADDRINUSE);
    strcpy(context->path, name.sun_path);
    if (listen(context->listening, 4096) || pipe(events))
        return NULL;
    context->completed = eventfd(0, EFD_NONBLOCK);
    context->timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK);
    context->epoll = epoll_create1(EPOLL_CLOEXEC);
    context->events = events[1];
    watch(context, context->listening);
    watch(context, context->completed);
    watch(context, context->timer);
    context->ibv.device = device;
    context->ibv.async_fd = events[0];
    context->ibv.cmd_fd = -1;
    context->ibv.num_comp_vectors = 1;
    context->ibv.ops.poll_cq = poll_cq;
    context->ibv.ops.req_notify_cq = req_notify_cq;
    context->ibv.ops.post_srq_recv = post_srq_recv;
    context->ibv.ops.post_send = post_send;
    return &context->ibv;
}

int ibv_close_device(struct ibv_context *ibv)
{
    struct context *context = (struct context *)ibv;
    int fds[] = {context->listening, context->completed, context->timer,
                 context->epoll,     context->events,    ibv->async_fd};
    for (struct connection *next, *each = context->connections; each; each = next) {
        next = each->next;
        if (each->fd >= 0)
            close(each->fd);
        free(each);
    }
    for (int i = 0; i < 6; i++)
        close(fds[i]);
    unlink(context->path);
    free(context);
    return 0;
}

int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
    memset(attr, 0, sizeof(*attr));
    attr->max_mr_size = -1;
    attr->max_qp = attr->max_cq = attr->max_srq = attr->max_mr = attr->max_pd = 1 << 16;
    attr->max_qp_wr = attr->max_cqe = attr->max_srq_wr = 1 << 15;
    attr->max_sge = attr->max_srq_sge = attr->max_sge_rd = MAX_SGE;
    attr->max_qp_rd_atom = attr->max_qp_init_rd_atom = 16;
    attr->max_pkeys = attr->phys_port_cnt = 1;
    return 0;
}

int ibv_query_port(struct ibv_context *ibv, uint8_t number, struct _compat_ibv_port_attr *compat)
{
    struct ibv_port_attr *attr = (struct ibv_port_attr *)compat;
    struct context *context = (struct context *)ibv;
    attr->state = is_down(ibv) ? IBV_PORT_DOWN : IBV_PORT_ACTIVE;
    attr->max_mtu = attr->active_mtu = IBV_MTU_4096;
    attr->gid_tbl_len = attr->pkey_tbl_len = 1;
    attr->max_msg_sz = 1 << 30;
    attr->lid = context->lid;
    attr->active_width = 2;  /* four lanes */
    attr->active_speed = 32; /* of EDR: 100 Gbit/s */
    attr->phys_state = 5;
    attr->link_layer = IBV_LINK_LAYER_INFINIBAND;
    return 0;
}

int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid)
{
    gid->global.subnet_prefix = 0x80fe; /* fe80::, as the network orders bytes */
    gid->global.interface_id = ((struct context *)context)->lid;
    return 0;
}

int ibv_query_pkey(struct ibv_context *context, uint8_t port, int index, __be16 *pkey)
{
    *pkey = 0xffff;
    return 0;
}

int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event)
{
    return read(context->async_fd, event, sizeof(*event)) == sizeof(*event) ? 0 : -1;
}

void ibv_ack_async_event(struct ibv_async_event *event) {}

/* -- memory -- */

struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
    struct ibv_pd *pd = calloc(1, sizeof(*pd));
    pd->context = context;
    return pd;
}

int ibv_dealloc_pd(struct ibv_pd *pd)
{
    free(pd);
    return 0;
}

struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *addr, size_t length, uint64_t iova, unsigned access)
{
    const char *limit = getenv("SOFTWARE_NIC_LIMIT");
    if (limit && length > strtoull(limit, NULL, 10)) {
        errno = ENOMEM;
        return NULL;
    }
    struct ibv_mr *mr = calloc(1, sizeof(*mr));
    *mr = (struct ibv_mr){pd->context, pd, addr, length};
    return mr;
}

struct ibv_mr *ibv_reg_dmabuf_mr(struct ibv_pd *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access)
{
    errno = EOPNOTSUPP;
    return NULL;
}

int ibv_dereg_mr(struct ibv_mr *mr)
{
    free(mr);
    return 0;
}

/* -- queues -- */

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context)
{
    struct ibv_comp_channel *channel = calloc(1, sizeof(*channel));
    channel->context = context;
    channel->fd = dup(((struct context *)context)->epoll);
    return channel;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *channel)
{
    close(channel->fd);
    free(channel);
    return 0;
}

int ibv_get_cq_event(struct ibv_comp_channel *channel, struct ibv_cq **cq, void **cq_context)
{
    errno = EAGAIN;
    return -1;
}

void ibv_ack_cq_events(struct ibv_cq *cq, unsigned count) {}

struct ibv_cq *ibv_create_cq(struct ibv_context *ibv, int size, void *own, struct ibv_comp_channel *channel, int vector)
{
    struct cq *cq = calloc(1, sizeof(*cq));
    cq->ibv.context = ibv;
    cq->ibv.channel = channel;
    cq->ibv.cqe = cq->size = 1 << 15;
    cq->wcs = calloc(cq->size, sizeof(*cq->wcs));
    cq->next = ((struct context *)ibv)->cqs;
    ((struct context *)ibv)->cqs = cq;
    return &cq->ibv;
}

int ibv_destroy_cq(struct ibv_cq *ibv)
{
    struct cq *cq = (struct cq *)ibv, **place = &((struct context *)ibv->context)->cqs;
    while (*place != cq)
        place = &(*place)->next;
    *place = cq->next;
    free(cq->wcs);
    free(cq);
    return 0;
}

struct ibv_srq *ibv_create_srq(struct ibv_pd *pd, struct ibv_srq_init_attr *attr)
{
    struct srq *srq = calloc(1, sizeof(*srq));
    srq->ibv.context = pd->context;
    srq->ibv.pd = pd;
    srq->size = attr->attr.max_wr = 1 << 15;
    srq->sges = calloc(srq->size, sizeof(*srq->sges));
    srq->ids = calloc(srq->size, sizeof(*srq->ids));
    return &srq->ibv;
}

int ibv_destroy_srq(struct ibv_srq *ibv)
{
    struct srq *srq = (struct srq *)ibv;
    free(srq->sges);
    free(srq->ids);
    free(srq);
    return 0;
}

struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
    struct context *context = (struct context *)pd->context;
    struct qp *qp;
    if (attr->qp_type != IBV_QPT_RC) {
        errno = EOPNOTSUPP;
        return NULL;
    }
    qp = calloc(1, sizeof(*qp));
    qp->fd = qp->memory = -1;
    qp->last = &qp->first;
    qp->ibv.context = pd->context;
    qp->ibv.pd = pd;
    qp->ibv.send_cq = attr->send_cq;
    qp->ibv.recv_cq = attr->recv_cq;
    qp->ibv.srq = attr->srq;
    qp->ibv.qp_type = attr->qp_type;
    qp->ibv.qp_num = __sync_fetch_and_add(&next_qp, 1);
    attr->cap.max_send_sge = MAX_SGE;
    attr->cap.max_inline_data = 256;
    qp->cap = attr->cap;
    qp->next = context->qps;
    context->qps = qp;
    return &qp->ibv;
}

static int connect_qp(struct qp *qp)
{
    struct sockaddr_un name = {AF_UNIX};
    uint32_t number = qp->peer.dest_qp_num;
    int memory = open("/proc/self/mem", O_RDWR | O_CLOEXEC), failed;
    snprintf(name.sun_path, sizeof(name.sun_path), "%s/%d", getenv("SOFTWARE_NIC"), qp->peer.ah_attr.dlid);
    qp->fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    failed = connect(qp->fd, (void *)&name, sizeof(name)) || exchange(qp->fd, &number, &memory, send_message) < 0;
    close(memory);
    return failed ? errno : 0;
}

int ibv_modify_qp(struct ibv_qp *ibv, struct ibv_qp_attr *attr, int mask)
{
    struct qp *qp = (struct qp *)ibv;
    struct ibv_async_event event = {.element.qp = ibv, .event_type = IBV_EVENT_QP_LAST_WQE_REACHED};
    if (!(mask & IBV_QP_STATE))
        return 0;
    if (attr->qp_state == IBV_QPS_ERR && ibv->state == IBV_QPS_ERR)
        return 0;
    ibv->state = attr->qp_state;
    if (attr->qp_state == IBV_QPS_RTR) {
        qp->peer = *attr;
        return connect_qp(qp);
    }
    if (attr->qp_state == IBV_QPS_ERR) {
        qp->is_dead |= 1;
        advance(qp);
        return write(((struct context *)ibv->context)->events, &event, sizeof(event)) < 0;
    }
    return 0;
}

int ibv_query_qp(struct ibv_qp *ibv, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init)
{
    struct qp *qp = (struct qp *)ibv;
    *attr = qp->peer;
    attr->qp_state = ibv->state;
    attr->cap = init->cap = qp->cap;
    return 0;
}

int ibv_destroy_qp(struct ibv_qp *ibv)
{
    struct context *context = (struct context *)ibv->context;
    struct qp *qp = (struct qp *)ibv, **place = &context->qps;
    while (*place != qp)
        place = &(*place)->next;
    *place = qp->next;
    for (struct connection *each = context->connections; each; each = each->next)
        if (each->qp == qp && each->fd >= 0) {
            close(each->fd);
            each->fd = -1;
        }
    for (struct request *next, *each = qp->first; each; each = next) {
        next = each->next;
        free(each);
    }
    if (qp->fd >= 0)
        close(qp->fd);
    if (qp->memory >= 0)
        close(qp->memory);
    free(qp);
    return 0;
}

int ibv_query_ece(struct ibv_qp *qp, struct ibv_ece *ece) { return EOPNOTSUPP; }
int ibv_set_ece(struct ibv_qp *qp, struct ibv_ece *ece) { return EOPNOTSUPP; }

/* -- /dev/infiniband, which UCX looks at -- */

static const char *device_file(const char *path)
{
    return strncmp(path, "/dev/infiniband/", 16) ? path : "/dev/null";
}

int __xstat(int version, const char *path, struct stat *found)
{
    return fstatat(AT_FDCWD, device_file(path), found, 0);
}

int access(const char *path, int mode) { return faccessat(AT_FDCWD, device_file(path), mode, 0); }
