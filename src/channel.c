#include "channel.h"

#include <errno.h>
#include <linux/sockios.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

enum {
    READS_AT_ONCE = 8, /* from one channel, before the next channel is read */
    EVENTS_AT_ONCE = 32,
    MUCH_NBYTES = 4096, /* a read that puts this much into place reads only the next head ahead */
};

static void send_credit(struct sr_channels *channels, struct sr_channel *channel);

/* ---- the channels --------------------------------------------------------------------------------------------- */

static void lock(struct sr_channels *channels)
{
    sr_flag_acquire(&channels->lock, 1); /* it is held for a short time: one or two system calls */
}

static void unlock(struct sr_channels *channels) { sr_flag_release(&channels->lock); }

void sr_channels_open(struct sr_channels *channels, struct sr_channel *channel, int nchannels, int news)
{
    channels->channel = channel;
    channels->nchannels = nchannels;
    channels->news = news;
    channels->reason_from = -1;
}

static uint32_t number_of(const struct sr_channels *channels, const struct sr_channel *channel)
{
    return (uint32_t)(channel - channels->channel);
}

static struct epoll_event events_of(const struct sr_channels *channels, const struct sr_channel *channel)
{
    return (struct epoll_event){.events = channel->watched ? EPOLLIN | EPOLLOUT : EPOLLIN,
                                .data.u32 = number_of(channels, channel)};
}

int sr_channel_open(struct sr_channels *channels, struct sr_channel *channel, int fd, int rank, struct sr_ring *ring,
                    void *bytes, uint64_t nbytes, uint64_t first, void *rest)
{
    struct epoll_event events = events_of(channels, channel);
    channel->fd = fd;
    channel->rank = rank;
    channel->rest = rest;
    channel->first = channel->seen_taken = first;
    sr_ring_format(ring, first);
    sr_ring_open_end(&channel->in, ring, bytes, nbytes, first, &channels->nobody, NULL, SR_CHANNEL_PIECE_NBYTES);
    if (epoll_ctl(channels->news, EPOLL_CTL_ADD, fd, &events) != 0)
        return errno;
    send_credit(channels, channel);
    return 0;
}

/* Return whether the reason of the abort arrives on this channel, and has not arrived as a whole. */
static bool brings_reason(const struct sr_channels *channels, const struct sr_channel *channel)
{
    return channels->reason_from == (int)number_of(channels, channel) && sr_flag_load(&channels->aborted_by) == 0;
}

/* End a channel. Pieces that have arrived stay in its ring. */
static void end_channel(struct sr_channels *channels, struct sr_channel *channel, enum sr_channel_end end, int error)
{
    epoll_ctl(channels->news, EPOLL_CTL_DEL, channel->fd, NULL);
    channel->error = error;
    channel->unwritable = end != SR_CHANNEL_DAMAGED; /* a rank that sends invalid bytes can still be notified */
    if (brings_reason(channels, channel))
        channels->reason_from = -1;
    sr_flag_set(&channel->end, end);
}

/* ---- sending ------------------------------------------------------------------------------------------------ */

static void watch(struct sr_channels *channels, struct sr_channel *channel, bool wanted)
{
    if (channel->watched != wanted && sr_flag_load(&channel->end) == SR_CHANNEL_OPEN) {
        channel->watched = wanted;
        struct epoll_event events = events_of(channels, channel);
        epoll_ctl(channels->news, EPOLL_CTL_MOD, channel->fd, &events);
    }
}

/* Return how many bytes of these places the socket takes. If it takes no more at all, a read returns the reason. */
static size_t put_on_socket(struct sr_channels *channels, struct sr_channel *channel, struct iovec *place,
                            size_t nplaces)
{
    const struct msghdr all = {.msg_iov = place, .msg_iovlen = nplaces};
    const ssize_t nbytes = sendmsg(channel->fd, &all, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (nbytes >= 0) {
        channel->put += (uint64_t)nbytes;
        return (size_t)nbytes;
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS || errno == ENOMEM)
        watch(channels, channel, true);
    else if (errno != EINTR)
        channel->unwritable = true;
    return 0;
}

static bool has_rest(const struct sr_channel *channel)
{
    return !channel->unwritable && channel->rest_begin < channel->rest_end;
}

static void send_rest(struct sr_channels *channels, struct sr_channel *channel)
{
    if (has_rest(channel)) {
        struct iovec place = {channel->rest + channel->rest_begin, channel->rest_end - channel->rest_begin};
        channel->rest_begin += put_on_socket(channels, channel, &place, 1);
    }
    if (!has_rest(channel)) {
        channel->rest_begin = channel->rest_end = 0;
        watch(channels, channel, channel->nowed > 0 && !channel->unwritable);
    }
}

/* Keep the bytes of a frame that the socket has not taken: every frame is sent to its end. */
static void keep_rest(struct sr_channels *channels, struct sr_channel *channel, const struct iovec place[2],
                      size_t taken)
{
    for (int i = 0; i < 2; i++) {
        const size_t skip = taken < place[i].iov_len ? taken : place[i].iov_len;
        if (skip < place[i].iov_len)
            memcpy(channel->rest + channel->rest_end, (const char *)place[i].iov_base + skip, place[i].iov_len - skip);
        channel->rest_end += place[i].iov_len - skip;
        taken -= skip;
    }
    watch(channels, channel, true);
}

static void send_frame(struct sr_channels *channels, struct sr_channel *channel, const struct sr_channel_head *head,
                       const void *body)
{
    struct iovec place[2] = {{(void *)head, sizeof *head}, {(void *)body, head->nbytes}};
    const size_t nbytes = sizeof *head + head->nbytes;
    size_t taken = 0;
    send_rest(channels, channel);
    if (channel->unwritable || channel->rest_end + nbytes > SR_CHANNEL_REST_NBYTES)
        return;
    if (!has_rest(channel))
        taken = put_on_socket(channels, channel, place, 2);
    if (taken < nbytes && !channel->unwritable)
        keep_rest(channels, channel, place, taken);
}

static void note_messages_end(struct sr_channel *channel)
{
    channel->messages_end = channel->put + (channel->rest_end - channel->rest_begin);
}

/* Send owed receipts as long as the socket takes them. So the rest has at most one of them. */
static void send_receipts(struct sr_channels *channels, struct sr_channel *channel)
{
    for (uint32_t word = 0; word < SR_RECEIPTS_WORDS && channel->nowed > 0; word++)
        while (channel->owed[word] != 0 && !has_rest(channel)) {
            const uint32_t number = 64 * word + (uint32_t)__builtin_ctzll(channel->owed[word]);
            const struct sr_channel_head head = {
                .magic = SR_CHANNEL_MAGIC, .what = SR_CHANNEL_RECEIPT, .whole = number};
            channel->owed[word] &= channel->owed[word] - 1;
            channel->nowed--;
            send_frame(channels, channel, &head, NULL);
            note_messages_end(channel);
        }
}

/* Send what is left over. */
static void send_unsent(struct sr_channels *channels, struct sr_channel *channel)
{
    send_rest(channels, channel);
    if (channel->nowed > 0)
        send_receipts(channels, channel);
}

void sr_channel_give_receipt(struct sr_channels *channels, struct sr_channel *channel, uint32_t number)
{
    lock(channels);
    channel->owed[number / 64] |= sr_receipt_bit(number);
    channel->nowed++;
    send_unsent(channels, channel);
    unlock(channels);
}

void sr_channel_notify(struct sr_channels *channels, struct sr_channel *channel, enum sr_channel_what what,
                       const void *body, uint32_t nbytes)
{
    const struct sr_channel_head head = {.magic = SR_CHANNEL_MAGIC, .what = what, .nbytes = nbytes};
    lock(channels);
    /* There may be any number of notes about calls to a rank that never polls; the reason of an abort needs room. */
    if (what != SR_CHANNEL_CALLING ||
        channel->rest_end + 2 * sizeof head + nbytes + SR_CHANNEL_REASON_NBYTES <= SR_CHANNEL_REST_NBYTES)
        send_frame(channels, channel, &head, body);
    if (what == SR_CHANNEL_VIEW)
        note_messages_end(channel);
    unlock(channels);
}

/* Send credit if the limit has grown by a quarter of the ring. The reader publishes `taken` at least every quarter. So
   the sender misses credit for less than half of the ring once the reader has taken everything, and a piece takes at
   most half: the sender always finds room in the end. */
static void send_credit(struct sr_channels *channels, struct sr_channel *channel)
{
    const uint64_t taken = sr_flag_load(&channel->in.ring->taken.value) - channel->first;
    const struct sr_channel_head head = {
        .magic = SR_CHANNEL_MAGIC, .what = SR_CHANNEL_CREDIT, .whole = channel->in.nbytes + taken + channel->bypassed};
    if (head.whole - channel->granted >= channel->in.nbytes / 4) {
        channel->granted = head.whole;
        send_frame(channels, channel, &head, NULL);
    }
}

static size_t most_in_a_piece(const struct sr_channel *channel)
{
    const size_t half = channel->remote_ring_nbytes / 2 - 2 * SR_CACHE_LINE;
    return half < SR_CHANNEL_PIECE_NBYTES ? half : SR_CHANNEL_PIECE_NBYTES;
}

/* Return whether the last piece is on the socket, or in the rest. */
static bool is_pushed(const struct sr_outgoing *message)
{
    return (message->head.flags & SR_FRAME_LAST) != 0;
}

/* Send one piece. Return false if the other end's ring, or the socket, has no room for it. */
static bool push_piece(struct sr_channels *channels, struct sr_channel *channel, struct sr_outgoing *message)
{
    const uint64_t left = message->head.message_nbytes - message->offset;
    if (channel->remote_ring_nbytes == 0)
        return false;
    const size_t most = most_in_a_piece(channel);
    const uint32_t nbytes = (uint32_t)(left <= most ? left : most);
    const struct sr_channel_head head = {
        .magic = SR_CHANNEL_MAGIC, .what = SR_CHANNEL_PIECE, .nbytes = nbytes,
        .flags = (message->offset == 0 ? SR_FRAME_FIRST : 0) | (left == nbytes ? SR_FRAME_LAST : 0),
        .tag = message->head.tag, .kind = message->head.kind,
        .whole = message->head.nbytes_and_receipt};
    struct iovec place[2] = {{(void *)&head, sizeof head}, {(void *)(message->data + message->offset), nbytes}};
    if (channel->sent + sr_ring_frame_nbytes(nbytes) + SR_CACHE_LINE > channel->limit)
        return false;
    const uint64_t end = channel->put + sizeof head + nbytes;
    const size_t taken = put_on_socket(channels, channel, place, 2);
    if (taken == 0)
        return false;
    if (head.flags & SR_FRAME_LAST)
        channel->messages_end = end;
    if (taken < sizeof head + nbytes)
        keep_rest(channels, channel, place, taken);
    channel->sent += sr_ring_frame_nbytes(nbytes);
    message->offset += nbytes;
    message->head.flags = head.flags;
    return true;
}

/* The caller may make no more calls once its message is whole, so the socket must have taken all of it by then. */
enum sr_ring_status sr_channel_push(struct sr_channels *channels, struct sr_channel *channel,
                                    struct sr_outgoing *message)
{
    lock(channels);
    if (has_rest(channel))
        send_unsent(channels, channel);
    while (!is_pushed(message) && !channel->unwritable && !has_rest(channel) && push_piece(channels, channel, message))
        ;
    const bool is_whole = is_pushed(message) && !has_rest(channel);
    unlock(channels);
    return is_whole ? SR_RING_WHOLE : SR_RING_WAIT;
}

void sr_channel_probe(struct sr_channels *channels, struct sr_channel *channel, uint64_t limit_ns)
{
    lock(channels);
    if (sr_flag_load(&channel->end) == SR_CHANNEL_OPEN && sr_tcp_probe_is_cut(&channel->probe, channel->fd, limit_ns))
        end_channel(channels, channel, SR_CHANNEL_FAILED, ETIMEDOUT);
    unlock(channels);
}

bool sr_channel_has_unsent(struct sr_channels *channels, struct sr_channel *channel)
{
    lock(channels);
    send_unsent(channels, channel);
    const bool has_unsent = has_rest(channel);
    unlock(channels);
    return has_unsent;
}

bool sr_channel_is_delivering(struct sr_channels *channels, struct sr_channel *channel)
{
    int unacknowledged = 0;
    lock(channels);
    send_unsent(channels, channel);
    const bool is_open = !channel->unwritable && sr_flag_load(&channel->end) == SR_CHANNEL_OPEN;
    const bool is_delivering =
        is_open && (channel->nowed > 0 || channel->put < channel->messages_end ||
                    (ioctl(channel->fd, SIOCOUTQ, &unacknowledged) == 0 &&
                     (uint64_t)unacknowledged > channel->put - channel->messages_end));
    unlock(channels);
    return is_delivering;
}

/* ---- receiving ---------------------------------------------------------------------------------------------- */

static struct sr_frame frame_of(const struct sr_channel_head *head)
{
    return (struct sr_frame){.nbytes_and_receipt = head->whole, .nbytes = head->nbytes, .flags = head->flags,
                             .tag = head->tag, .kind = head->kind};
}

/* Return whether this piece may bypass the ring: it is the next one of the message that the reader is receiving, and
   the ring is empty. */
static bool may_bypass(const struct sr_channel *channel, const struct sr_frame *frame)
{
    if (channel->incoming == NULL || channel->incoming->data == NULL ||
        channel->in.position != channel->out_of->position)
        return false;
    struct sr_incoming received = *channel->incoming;
    received.offset += channel->uncounted;
    return received.offset > 0 && received.offset < received.nbytes && sr_ring_continues(&received, frame);
}

/* Return false if the piece is invalid: no rank of this version sends it. */
static bool begin_piece(struct sr_channels *channels, struct sr_channel *channel, bool by_reader)
{
    const struct sr_frame frame = frame_of(&channel->head);
    if (frame.flags & ~(uint32_t)(SR_FRAME_FIRST | SR_FRAME_LAST) || frame.nbytes > frame.message_nbytes ||
        frame.nbytes > channel->in.piece_nbytes)
        return false;
    channel->bypasses = by_reader && may_bypass(channel, &frame);
    if (channel->bypasses) {
        channel->target = channel->incoming->data + channel->incoming->offset + channel->uncounted;
        channel->has_bypass = true;
        return true;
    }
    if (sr_flag_load(&channel->opened) == 0) {
        sr_flag_set(&channel->opened, 1);
        sr_flag_set(&channels->nopened, sr_flag_load(&channels->nopened) + 1);
    }
    return sr_ring_has_room(&channel->in, sr_ring_frame_nbytes(frame.nbytes));
}

static void finish_piece(struct sr_channels *channels, struct sr_channel *channel)
{
    const struct sr_frame frame = frame_of(&channel->head);
    if (!channel->bypasses) {
        sr_ring_announce(&channel->in, &frame);
        return;
    }
    channel->uncounted += frame.nbytes;
    channel->bypassed += sr_ring_frame_nbytes(frame.nbytes);
    channel->bypasses = false;
    send_credit(channels, channel);
}

static bool take_credit(struct sr_channel *channel)
{
    const uint64_t limit = channel->head.whole;
    if (channel->remote_ring_nbytes == 0) {
        if (!sr_ring_is_valid_length(limit))
            return false;
        channel->remote_ring_nbytes = limit;
    }
    if (limit < channel->limit || limit - channel->remote_ring_nbytes > channel->sent)
        return false;
    channel->limit = limit;
    return true;
}

/* Begin a frame whose head has arrived. Return false if the head is invalid. */
static bool begin_frame(struct sr_channels *channels, struct sr_channel *channel, bool by_reader)
{
    if (channel->head.magic != SR_CHANNEL_MAGIC)
        return false;
    switch (channel->head.what) {
    case SR_CHANNEL_ABORT:
        if (channel->head.nbytes > SR_CHANNEL_REASON_NBYTES)
            return false;
        if (channels->reason_from < 0)
            channels->reason_from = (int)number_of(channels, channel); /* reasons on other channels are discarded */
        return true;
    case SR_CHANNEL_LEAVING:
        sr_flag_set(&channel->left, 1);
        return channel->head.nbytes == 0;
    case SR_CHANNEL_CREDIT:
        return channel->head.nbytes == 0 && take_credit(channel);
    case SR_CHANNEL_PIECE:
        return begin_piece(channels, channel, by_reader);
    case SR_CHANNEL_RECEIPT:
        return channel->head.nbytes == 0 && channel->head.whole < SR_RECEIPTS;
    case SR_CHANNEL_VIEW:
    case SR_CHANNEL_CALLING:
    case SR_CHANNEL_CONFIRMED:
        return channel->head.nbytes == sr_channel_note_nbytes(channel->head.what);
    default:
        return false;
    }
}

/* End a frame that has arrived as a whole. */
static void finish_frame(struct sr_channels *channels, struct sr_channel *channel)
{
    const bool in_ring = !channel->bypasses;
    if (channel->head.what == SR_CHANNEL_PIECE)
        finish_piece(channels, channel);
    if (channel->head.what == SR_CHANNEL_RECEIPT)
        sr_receipt_give(&channel->receipts, (uint32_t)channel->head.whole, &channels->nobody);
    if (channel->head.what == SR_CHANNEL_ABORT && brings_reason(channels, channel)) {
        channels->reason_nbytes = channel->head.nbytes;
        sr_flag_set(&channels->aborted_by, number_of(channels, channel) + 1u);
    }
    if (sr_channel_is_note(channel->head.what)) {
        struct sr_channel_note *note = sr_channel_note_of(channel, channel->head.what);
        memcpy(note->last, note->next, channel->head.nbytes);
        note->count++;
        if (channel->head.what == SR_CHANNEL_CONFIRMED) {
            struct sr_channel_call call;
            memcpy(&call, note->last, sizeof call);
            sr_flag_set(&channel->confirmed, call.seq);
        }
    }
    channel->pausing = channel->head.what == SR_CHANNEL_PIECE && !(channel->head.flags & SR_FRAME_LAST) && in_ring;
    channel->head_nbytes = channel->arrived = 0;
}

static bool is_midway(const struct sr_channel *channel) { return channel->head_nbytes == sizeof channel->head; }

/* Set the places, at most two, for the rest of the frame that is arriving. Return their number: 0 to discard it. */
static size_t places_of(struct sr_channels *channels, struct sr_channel *channel, struct iovec *place)
{
    unsigned char *target = channel->target;
    if (!is_midway(channel))
        return 0;
    const size_t left = channel->head.nbytes - channel->arrived;
    if (channel->head.what == SR_CHANNEL_PIECE && !channel->bypasses) {
        const uint64_t ring_nbytes = channel->in.nbytes;
        const uint64_t begin =
            (sr_ring_data_at(channel->in.position, channel->head.nbytes) + channel->arrived) & (ring_nbytes - 1);
        const size_t before_end = left < ring_nbytes - begin ? left : (size_t)(ring_nbytes - begin);
        place[0] = (struct iovec){channel->in.bytes + begin, before_end};
        place[1] = (struct iovec){channel->in.bytes, left - before_end};
        return 2;
    }
    if (channel->head.what == SR_CHANNEL_ABORT) {
        target = brings_reason(channels, channel) ? channels->reason : NULL;
    } else if (sr_channel_is_note(channel->head.what)) {
        target = sr_channel_note_of(channel, channel->head.what)->next;
    }
    if (target == NULL)
        return 0;
    place[0] = (struct iovec){target + channel->arrived, left};
    return 1;
}

static void count_arrived(struct sr_channels *channels, struct sr_channel *channel, size_t nbytes)
{
    channel->arrived += nbytes;
    if (is_midway(channel) && channel->arrived == channel->head.nbytes)
        finish_frame(channels, channel);
}

static void put_in_place(struct sr_channels *channels, struct sr_channel *channel, const unsigned char *from,
                         size_t nbytes)
{
    struct iovec place[2];
    const size_t nplaces = places_of(channels, channel, place);
    size_t done = 0;
    for (size_t i = 0; i < nplaces; i++) {
        const size_t part = nbytes - done < place[i].iov_len ? nbytes - done : place[i].iov_len;
        if (part > 0)
            memcpy(place[i].iov_base, from + done, part);
        done += part;
    }
    count_arrived(channels, channel, nbytes);
}

/* Process bytes that were read into the scratch memory: frames and parts of frames. They begin with a head, in the
   middle of a head, or in the middle of a frame that is discarded. Return false if a head is invalid. */
static bool take_apart(struct sr_channels *channels, struct sr_channel *channel, const unsigned char *from,
                       size_t nbytes, bool by_reader)
{
    while (nbytes > 0) {
        size_t part;
        if (is_midway(channel)) {
            const size_t left = channel->head.nbytes - channel->arrived;
            part = nbytes < left ? nbytes : left;
            put_in_place(channels, channel, from, part);
        } else {
            const size_t left = sizeof channel->head - channel->head_nbytes;
            part = nbytes < left ? nbytes : left;
            memcpy((unsigned char *)&channel->head + channel->head_nbytes, from, part);
            channel->head_nbytes += part;
            if (is_midway(channel)) {
                if (!begin_frame(channels, channel, by_reader))
                    return false;
                count_arrived(channels, channel, 0);
            }
        }
        from += part;
        nbytes -= part;
    }
    return true;
}

static bool receive(struct sr_channels *channels, struct sr_channel *channel, bool by_reader)
{
    bool moved = false;
    for (int i = 0; i < READS_AT_ONCE; i++) {
        struct iovec place[3];
        struct msghdr all = {.msg_iov = place};
        size_t nplaces = places_of(channels, channel, place), in_place = 0;
        for (size_t at = 0; at < nplaces; at++)
            in_place += place[at].iov_len;
        const size_t ahead = in_place >= MUCH_NBYTES ? sizeof channel->head : sizeof channels->scratch;
        place[nplaces] = (struct iovec){channels->scratch, ahead};
        all.msg_iovlen = nplaces + 1;
        const ssize_t received = recvmsg(channel->fd, &all, MSG_DONTWAIT);
        if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
            return moved;
        if (received <= 0) {
            const bool closed = received == 0 || errno == ECONNRESET || errno == EPIPE;
            end_channel(channels, channel, closed ? SR_CHANNEL_CLOSED : SR_CHANNEL_FAILED, closed ? 0 : errno);
            return true;
        }
        moved = true;
        const size_t nbytes = (size_t)received;
        if (in_place > 0)
            count_arrived(channels, channel, nbytes < in_place ? nbytes : in_place);
        if (nbytes > in_place && !take_apart(channels, channel, channels->scratch, nbytes - in_place, by_reader)) {
            end_channel(channels, channel, SR_CHANNEL_DAMAGED, EBADMSG);
            return true;
        }
        if (nbytes < in_place + ahead)
            return true; /* the socket is empty */
        if (by_reader && channel->pausing)
            return true; /* the reader empties the ring first, so that the message's next pieces may bypass it */
    }
    return moved;
}

/* ---- polling ------------------------------------------------------------------------------------------------ */

static bool poll_sockets(struct sr_channels *channels, bool by_reader)
{
    struct epoll_event events[EVENTS_AT_ONCE];
    const int nevents = channels->news < 0 ? 0 : epoll_wait(channels->news, events, EVENTS_AT_ONCE, 0);
    bool moved = false;
    for (int i = 0; i < nevents; i++) {
        struct sr_channel *channel = &channels->channel[events[i].data.u32];
        if (sr_flag_load(&channel->end) != SR_CHANNEL_OPEN)
            continue;
        if (events[i].events & EPOLLOUT) {
            send_unsent(channels, channel);
            moved = true;
        }
        if (events[i].events & ~(uint32_t)EPOLLOUT && receive(channels, channel, by_reader))
            moved = true;
    }
    return moved;
}

bool sr_channels_step(struct sr_channels *channels)
{
    if (!sr_flag_take(&channels->lock, 1))
        return false;
    const bool moved = poll_sockets(channels, true);
    unlock(channels);
    return moved;
}

bool sr_channels_attend(struct sr_channels *channels)
{
    lock(channels);
    sr_flag_set(&channels->attended, 1);
    const bool moved = poll_sockets(channels, true);
    unlock(channels);
    return moved;
}

void sr_channels_wake(struct sr_channels *channels) { sr_flag_set(&channels->attended, 0); }

bool sr_channels_poll_abort(struct sr_channels *channels)
{
    if (sr_flag_load(&channels->aborted_by) == 0 && sr_flag_take(&channels->lock, 1)) {
        if (sr_flag_load(&channels->attended) == 0)
            poll_sockets(channels, false);
        unlock(channels);
    }
    return sr_flag_load(&channels->aborted_by) != 0;
}

void sr_channels_poll(struct sr_channels *channels)
{
    lock(channels);
    poll_sockets(channels, false);
    unlock(channels);
}

uint64_t sr_channel_last_note(struct sr_channels *channels, struct sr_channel *channel, enum sr_channel_what what,
                              void *note)
{
    lock(channels);
    const uint64_t count = sr_channel_note_of(channel, what)->count;
    memcpy(note, sr_channel_note_of(channel, what)->last, sr_channel_note_nbytes(what));
    unlock(channels);
    return count;
}

void sr_channels_shut(struct sr_channels *channels)
{
    lock(channels);
    for (int i = 0; i < channels->nchannels; i++) {
        if (sr_flag_load(&channels->channel[i].end) == SR_CHANNEL_OPEN)
            sr_flag_set(&channels->channel[i].end, SR_CHANNEL_CLOSED);
        channels->channel[i].unwritable = true;
    }
    channels->news = -1; /* another file may soon have its number */
    unlock(channels);
}

/* ---- the reader --------------------------------------------------------------------------------------------- */

void sr_channel_read(struct sr_channels *channels, struct sr_channel *channel, struct sr_ring_end *out_of,
                     struct sr_incoming *incoming, sr_ring_copy_fn *copy)
{
    sr_ring_open_end(out_of, channel->in.ring, channel->in.bytes, channel->in.nbytes, channel->first, &channels->nobody,
                     copy, SR_CHANNEL_PIECE_NBYTES);
    lock(channels);
    channel->out_of = out_of;
    channel->incoming = incoming;
    unlock(channels);
}

/* Add the bytes that bypassed the ring to the message's offset. Return whether more of the piece is still to arrive. */
static bool count_bypassed(struct sr_channels *channels, struct sr_channel *channel)
{
    lock(channels);
    channel->incoming->offset += channel->uncounted;
    channel->uncounted = 0;
    const bool more = channel->bypasses && is_midway(channel);
    unlock(channels);
    return more;
}

enum sr_ring_status sr_channel_pull(struct sr_channels *channels, struct sr_channel *channel)
{
    enum sr_ring_status status = SR_RING_WAIT;
    if (channel->has_bypass) {
        channel->has_bypass = count_bypassed(channels, channel);
        if (channel->incoming->offset == channel->incoming->nbytes)
            return SR_RING_WHOLE;
    }
    if (!channel->has_bypass)
        status = sr_ring_pull(channel->out_of, channel->incoming);
    const uint64_t taken = sr_flag_load(&channel->in.ring->taken.value);
    if (taken != channel->seen_taken) {
        channel->seen_taken = taken;
        lock(channels);
        send_credit(channels, channel);
        unlock(channels);
    }
    return status;
}

void sr_channel_withdraw(struct sr_channels *channels, struct sr_channel *channel)
{
    lock(channels);
    channel->target = NULL;
    unlock(channels);
}
