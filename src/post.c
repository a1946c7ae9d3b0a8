#include "post.h"

#include <errno.h>
#include <linux/sockios.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/uio.h>

enum {
    READS_AT_ONCE = 8, /* of one connection, before the others get their turn */
    EVENTS_AT_ONCE = 32,
    MUCH_NBYTES = 4096, /* where so much goes straight into place, no more than the next head is read ahead */
};

static void tell_limit(struct sr_office *office, struct sr_post *post);

/* ---- the office --------------------------------------------------------------------------------------------- */

static void take_turn(struct sr_office *office)
{
    while (!sr_flag_take(&office->turn, 1))
        sr_yield(); /* turns are short: a system call or two */
}

static void leave_turn(struct sr_office *office) { sr_flag_set(&office->turn, 0); }

void sr_office_open(struct sr_office *office, struct sr_post *post, int nposts, int news)
{
    office->post = post;
    office->nposts = nposts;
    office->news = news;
    office->word_from = -1;
}

static uint32_t number_of(const struct sr_office *office, const struct sr_post *post)
{
    return (uint32_t)(post - office->post);
}

static struct epoll_event events_of(const struct sr_office *office, const struct sr_post *post)
{
    return (struct epoll_event){.events = post->watched ? EPOLLIN | EPOLLOUT : EPOLLIN,
                                .data.u32 = number_of(office, post)};
}

int sr_post_open(struct sr_office *office, struct sr_post *post, int fd, int rank, struct sr_ring *ring, void *bytes,
                 uint64_t nbytes, uint64_t first, void *rest)
{
    struct epoll_event events = events_of(office, post);
    post->fd = fd;
    post->rank = rank;
    post->rest = rest;
    post->first = post->seen_taken = first;
    sr_ring_format(ring, bytes, first);
    sr_ring_open_end(&post->in, ring, bytes, nbytes, first, &office->nobody, NULL, SR_POST_PIECE_NBYTES);
    if (epoll_ctl(office->news, EPOLL_CTL_ADD, fd, &events) != 0)
        return errno;
    tell_limit(office, post);
    return 0;
}

/* It has come to its end: what came before stays. */
static void end_post(struct sr_office *office, struct sr_post *post, enum sr_post_end end, int error)
{
    epoll_ctl(office->news, EPOLL_CTL_DEL, post->fd, NULL);
    post->error = error;
    post->deaf = end != SR_POST_DAMAGED; /* who sent what makes no sense may be told so */
    if (office->word_from == (int)number_of(office, post) && sr_flag_load(&office->heard) == 0)
        office->word_from = -1;
    sr_flag_set(&post->end, end);
}

/* ---- sending ------------------------------------------------------------------------------------------------ */

static void watch(struct sr_office *office, struct sr_post *post, bool wanted)
{
    if (post->watched != wanted && sr_flag_load(&post->end) == SR_POST_OPEN) {
        post->watched = wanted;
        struct epoll_event events = events_of(office, post);
        epoll_ctl(office->news, EPOLL_CTL_MOD, post->fd, &events);
    }
}

/* How much of these places the socket takes. Why one takes nothing any more, reading tells. */
static size_t put_on_socket(struct sr_office *office, struct sr_post *post, struct iovec *place, size_t nplaces)
{
    const struct msghdr all = {.msg_iov = place, .msg_iovlen = nplaces};
    const ssize_t nbytes = sendmsg(post->fd, &all, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (nbytes >= 0) {
        post->put += (uint64_t)nbytes;
        return (size_t)nbytes;
    }
    if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ENOBUFS)
        watch(office, post, true);
    else if (errno != EINTR)
        post->deaf = true;
    return 0;
}

static bool has_rest(const struct sr_post *post) { return !post->deaf && post->rest_begin < post->rest_end; }

static void send_rest(struct sr_office *office, struct sr_post *post)
{
    if (has_rest(post)) {
        struct iovec place = {post->rest + post->rest_begin, post->rest_end - post->rest_begin};
        post->rest_begin += put_on_socket(office, post, &place, 1);
    }
    if (!has_rest(post)) {
        post->rest_begin = post->rest_end = 0;
        watch(office, post, false);
    }
}

/* What the socket has not taken of a frame, which cannot be left in the middle. */
static void keep_rest(struct sr_office *office, struct sr_post *post, const struct iovec *place, size_t nplaces,
                      size_t taken)
{
    for (size_t i = 0; i < nplaces; i++) {
        const size_t skip = taken < place[i].iov_len ? taken : place[i].iov_len;
        if (skip < place[i].iov_len)
            memcpy(post->rest + post->rest_end, (const char *)place[i].iov_base + skip, place[i].iov_len - skip);
        post->rest_end += place[i].iov_len - skip;
        taken -= skip;
    }
    watch(office, post, true);
}

static void say(struct sr_office *office, struct sr_post *post, const struct sr_post_head *head, const void *body)
{
    struct iovec place[2] = {{(void *)head, sizeof *head}, {(void *)body, head->nbytes}};
    const size_t nbytes = sizeof *head + head->nbytes;
    size_t taken = 0;
    send_rest(office, post);
    if (post->deaf || post->rest_end + nbytes > SR_POST_REST_NBYTES)
        return;
    if (!has_rest(post))
        taken = put_on_socket(office, post, place, 2);
    if (taken < nbytes && !post->deaf)
        keep_rest(office, post, place, 2, taken);
}

void sr_post_say(struct sr_office *office, struct sr_post *post, enum sr_post_what what, const void *body,
                 uint32_t nbytes)
{
    const struct sr_post_head head = {.magic = SR_POST_MAGIC, .what = what, .nbytes = nbytes};
    take_turn(office);
    say(office, post, &head, body);
    if (what == SR_POST_VIEW)
        post->messages_end = post->put + (post->rest_end - post->rest_begin);
    leave_turn(office);
}

/* The other end learns what room there is, every quarter of the ring; what the reader has not told of is less than
   another quarter, and a piece takes half of it at most. */
static void tell_limit(struct sr_office *office, struct sr_post *post)
{
    const uint64_t taken = sr_flag_load(&post->in.ring->taken.value) - post->first;
    const struct sr_post_head head = {
        .magic = SR_POST_MAGIC, .what = SR_POST_CREDIT, .whole = post->in.nbytes + taken + post->passed};
    if (head.whole - post->told >= post->in.nbytes / 4) {
        post->told = head.whole;
        say(office, post, &head, NULL);
    }
}

static size_t most_of_a_piece(const struct sr_post *post)
{
    const size_t half = post->there_nbytes / 2 - 2 * SR_CACHE_LINE;
    return half < SR_POST_PIECE_NBYTES ? half : SR_POST_PIECE_NBYTES;
}

/* One piece; false: there is no room for it. */
static bool push_piece(struct sr_office *office, struct sr_post *post, struct sr_outgoing *message)
{
    const uint64_t left = message->head.message_nbytes - message->offset;
    if (post->there_nbytes == 0)
        return false;
    const size_t most = most_of_a_piece(post);
    const uint32_t nbytes = (uint32_t)(left <= most ? left : most);
    const struct sr_post_head head = {
        .magic = SR_POST_MAGIC, .what = SR_POST_PIECE, .nbytes = nbytes,
        .flags = (message->offset == 0 ? SR_FRAME_FIRST : 0) | (left == nbytes ? SR_FRAME_LAST : 0),
        .tag = message->head.tag, .kind = message->head.kind, .whole = message->head.message_nbytes};
    struct iovec place[2] = {{(void *)&head, sizeof head}, {(void *)(message->data + message->offset), nbytes}};
    if (post->sent + sr_ring_frame_nbytes(nbytes) + SR_CACHE_LINE > post->limit)
        return false;
    const uint64_t end = post->put + sizeof head + nbytes;
    const size_t taken = put_on_socket(office, post, place, 2);
    if (taken == 0)
        return false;
    if (head.flags & SR_FRAME_LAST)
        post->messages_end = end;
    if (taken < sizeof head + nbytes)
        keep_rest(office, post, place, 2, taken);
    post->sent += sr_ring_frame_nbytes(nbytes);
    message->offset += nbytes;
    message->head.flags = head.flags;
    return true;
}

enum sr_ring_status sr_post_push(struct sr_office *office, struct sr_post *post, struct sr_outgoing *message)
{
    enum sr_ring_status status = SR_RING_WAIT;
    take_turn(office);
    if (has_rest(post))
        send_rest(office, post);
    while (status == SR_RING_WAIT && !post->deaf && !has_rest(post) && push_piece(office, post, message))
        if (message->head.flags & SR_FRAME_LAST)
            status = SR_RING_WHOLE;
    leave_turn(office);
    return status;
}

void sr_post_check_link(struct sr_office *office, struct sr_post *post, uint64_t limit_ns)
{
    take_turn(office);
    if (sr_flag_load(&post->end) == SR_POST_OPEN && sr_link_is_cut(&post->link, post->fd, limit_ns))
        end_post(office, post, SR_POST_FAILED, ETIMEDOUT);
    leave_turn(office);
}

bool sr_post_owes(struct sr_office *office, struct sr_post *post)
{
    take_turn(office);
    send_rest(office, post);
    const bool owes = has_rest(post);
    leave_turn(office);
    return owes;
}

bool sr_post_is_delivering(struct sr_office *office, struct sr_post *post)
{
    int unacknowledged = 0;
    take_turn(office);
    send_rest(office, post);
    const bool is_there = !post->deaf && sr_flag_load(&post->end) == SR_POST_OPEN;
    const bool is_delivering =
        is_there && (post->put < post->messages_end || (ioctl(post->fd, SIOCOUTQ, &unacknowledged) == 0 &&
                                                        (uint64_t)unacknowledged > post->put - post->messages_end));
    leave_turn(office);
    return is_delivering;
}

/* ---- receiving ---------------------------------------------------------------------------------------------- */

static struct sr_frame frame_of(const struct sr_post_head *head)
{
    return (struct sr_frame){.message_nbytes = head->whole, .nbytes = head->nbytes, .flags = head->flags,
                             .tag = head->tag, .kind = head->kind};
}

/* Whether the reader is in the middle of the message that this piece goes on with, and has all that came before it. */
static bool goes_past(const struct sr_post *post, const struct sr_frame *frame)
{
    if (post->incoming == NULL || post->incoming->data == NULL || post->in.position != post->out_of->position)
        return false;
    struct sr_incoming there = *post->incoming;
    there.offset += post->landed;
    return there.offset > 0 && there.offset < there.nbytes && sr_ring_continues(&there, frame);
}

/* False: no rank of this version sends it. */
static bool begin_piece(struct sr_office *office, struct sr_post *post, bool by_reader)
{
    const struct sr_frame frame = frame_of(&post->head);
    if (frame.flags & ~(uint32_t)(SR_FRAME_FIRST | SR_FRAME_LAST) || frame.nbytes > frame.message_nbytes ||
        frame.nbytes > post->in.piece_nbytes)
        return false;
    post->past = by_reader && goes_past(post, &frame);
    if (post->past) {
        post->target = post->incoming->data + post->incoming->offset + post->landed;
        post->mixed = true;
        return true;
    }
    if (sr_flag_load(&post->opened) == 0) {
        sr_flag_set(&post->opened, 1);
        sr_flag_set(&office->nopened, sr_flag_load(&office->nopened) + 1);
    }
    return sr_ring_has_room(&post->in, sr_ring_frame_nbytes(frame.nbytes));
}

static void finish_piece(struct sr_office *office, struct sr_post *post)
{
    const struct sr_frame frame = frame_of(&post->head);
    if (!post->past) {
        sr_ring_announce(&post->in, &frame);
        return;
    }
    post->landed += frame.nbytes;
    post->passed += sr_ring_frame_nbytes(frame.nbytes);
    post->past = false;
    tell_limit(office, post);
}

static bool heed_credit(struct sr_post *post)
{
    const uint64_t limit = post->head.whole;
    if (post->there_nbytes == 0) {
        if (!sr_ring_is_valid_length(limit))
            return false;
        post->there_nbytes = limit;
    }
    if (limit < post->limit || limit - post->there_nbytes > post->sent)
        return false;
    post->limit = limit;
    return true;
}

/* A head is there: false if it cannot be. */
static bool begin_frame(struct sr_office *office, struct sr_post *post, bool by_reader)
{
    if (post->head.magic != SR_POST_MAGIC)
        return false;
    switch (post->head.what) {
    case SR_POST_OVER:
        if (post->head.nbytes > SR_POST_WORD_NBYTES)
            return false;
        if (office->word_from < 0)
            office->word_from = (int)number_of(office, post); /* others' words are passed over */
        return true;
    case SR_POST_LEAVING:
        sr_flag_set(&post->left, 1);
        return post->head.nbytes == 0;
    case SR_POST_CREDIT:
        return post->head.nbytes == 0 && heed_credit(post);
    case SR_POST_PIECE:
        return begin_piece(office, post, by_reader);
    case SR_POST_VIEW:
    case SR_POST_CALLING:
    case SR_POST_CONFIRMED:
        return post->head.nbytes == sr_post_note_nbytes(post->head.what);
    default:
        return false;
    }
}

/* All of a frame is there. */
static void finish_frame(struct sr_office *office, struct sr_post *post)
{
    const bool in_ring = !post->past;
    if (post->head.what == SR_POST_PIECE)
        finish_piece(office, post);
    if (post->head.what == SR_POST_OVER && office->word_from == (int)number_of(office, post) &&
        sr_flag_load(&office->heard) == 0) {
        office->word_nbytes = post->head.nbytes;
        sr_flag_set(&office->heard, number_of(office, post) + 1u);
    }
    if (sr_post_is_note(post->head.what)) {
        struct sr_post_note *note = sr_post_note_of(post, post->head.what);
        memcpy(note->last, note->next, post->head.nbytes);
        note->count++;
        if (post->head.what == SR_POST_CONFIRMED) {
            struct sr_post_call call;
            memcpy(&call, note->last, sizeof call);
            sr_flag_set(&post->confirmed, call.seq);
        }
    }
    post->pausing = post->head.what == SR_POST_PIECE && !(post->head.flags & SR_FRAME_LAST) && in_ring;
    post->head_nbytes = post->arrived = 0;
}

static bool is_midway(const struct sr_post *post) { return post->head_nbytes == sizeof post->head; }

/* Where the rest of a frame that has begun goes: up to two places, none if it is passed over. */
static size_t places_of(struct sr_office *office, struct sr_post *post, struct iovec *place)
{
    unsigned char *target = post->target;
    if (!is_midway(post))
        return 0;
    const size_t left = post->head.nbytes - post->arrived;
    if (post->head.what == SR_POST_PIECE && !post->past) {
        const uint64_t ring_nbytes = post->in.nbytes;
        const uint64_t begin =
            (sr_ring_data_at(post->in.position, post->head.nbytes) + post->arrived) & (ring_nbytes - 1);
        const size_t before_end = left < ring_nbytes - begin ? left : (size_t)(ring_nbytes - begin);
        place[0] = (struct iovec){post->in.bytes + begin, before_end};
        place[1] = (struct iovec){post->in.bytes, left - before_end};
        return 2;
    }
    if (post->head.what == SR_POST_OVER) {
        const bool wanted = office->word_from == (int)number_of(office, post) && sr_flag_load(&office->heard) == 0;
        target = wanted ? office->word : NULL;
    } else if (sr_post_is_note(post->head.what)) {
        target = sr_post_note_of(post, post->head.what)->next;
    }
    if (target == NULL)
        return 0;
    place[0] = (struct iovec){target + post->arrived, left};
    return 1;
}

static void count_arrived(struct sr_office *office, struct sr_post *post, size_t nbytes)
{
    post->arrived += nbytes;
    if (is_midway(post) && post->arrived == post->head.nbytes)
        finish_frame(office, post);
}

static void put_in_place(struct sr_office *office, struct sr_post *post, const unsigned char *from, size_t nbytes)
{
    struct iovec place[2];
    const size_t nplaces = places_of(office, post, place);
    size_t done = 0;
    for (size_t i = 0; i < nplaces; i++) {
        const size_t part = nbytes - done < place[i].iov_len ? nbytes - done : place[i].iov_len;
        if (part > 0)
            memcpy(place[i].iov_base, from + done, part);
        done += part;
    }
    count_arrived(office, post, nbytes);
}

/* Frames and parts of them, from a head or the middle of a head on, or from the middle of one that is passed over. */
static bool take_apart(struct sr_office *office, struct sr_post *post, const unsigned char *from, size_t nbytes,
                       bool by_reader)
{
    while (nbytes > 0) {
        size_t part;
        if (is_midway(post)) {
            const size_t left = post->head.nbytes - post->arrived;
            part = nbytes < left ? nbytes : left;
            put_in_place(office, post, from, part);
        } else {
            const size_t left = sizeof post->head - post->head_nbytes;
            part = nbytes < left ? nbytes : left;
            memcpy((unsigned char *)&post->head + post->head_nbytes, from, part);
            post->head_nbytes += part;
            if (is_midway(post)) {
                if (!begin_frame(office, post, by_reader))
                    return false;
                count_arrived(office, post, 0);
            }
        }
        from += part;
        nbytes -= part;
    }
    return true;
}

static bool receive(struct sr_office *office, struct sr_post *post, bool by_reader)
{
    bool moved = false;
    for (int i = 0; i < READS_AT_ONCE; i++) {
        struct iovec place[3];
        struct msghdr all = {.msg_iov = place};
        size_t nplaces = places_of(office, post, place), in_place = 0;
        for (size_t at = 0; at < nplaces; at++)
            in_place += place[at].iov_len;
        const size_t ahead = in_place >= MUCH_NBYTES ? sizeof post->head : sizeof office->scratch;
        place[nplaces] = (struct iovec){office->scratch, ahead};
        all.msg_iovlen = nplaces + 1;
        const ssize_t received = recvmsg(post->fd, &all, MSG_DONTWAIT);
        if (received < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
            return moved;
        if (received <= 0) {
            const bool closed = received == 0 || errno == ECONNRESET || errno == EPIPE;
            end_post(office, post, closed ? SR_POST_CLOSED : SR_POST_FAILED, closed ? 0 : errno);
            return true;
        }
        moved = true;
        const size_t nbytes = (size_t)received;
        if (in_place > 0)
            count_arrived(office, post, nbytes < in_place ? nbytes : in_place);
        if (nbytes > in_place && !take_apart(office, post, office->scratch, nbytes - in_place, by_reader)) {
            end_post(office, post, SR_POST_DAMAGED, 0);
            return true;
        }
        if (nbytes < in_place + ahead)
            return true; /* there was no more */
        if (by_reader && post->pausing)
            return true; /* to read that, as what comes next of the message may go past the ring */
    }
    return moved;
}

/* ---- what there is to do ------------------------------------------------------------------------------------ */

static bool look_for_news(struct sr_office *office, bool by_reader)
{
    struct epoll_event events[EVENTS_AT_ONCE];
    const int nevents = office->news < 0 ? 0 : epoll_wait(office->news, events, EVENTS_AT_ONCE, 0);
    bool moved = false;
    for (int i = 0; i < nevents; i++) {
        struct sr_post *post = &office->post[events[i].data.u32];
        if (sr_flag_load(&post->end) != SR_POST_OPEN)
            continue;
        if (events[i].events & EPOLLOUT) {
            send_rest(office, post);
            moved = true;
        }
        if (events[i].events & ~(uint32_t)EPOLLOUT && receive(office, post, by_reader))
            moved = true;
    }
    return moved;
}

bool sr_office_step(struct sr_office *office)
{
    if (!sr_flag_take(&office->turn, 1))
        return false;
    const bool moved = look_for_news(office, true);
    leave_turn(office);
    return moved;
}

bool sr_office_attend(struct sr_office *office)
{
    take_turn(office);
    sr_flag_set(&office->attended, 1);
    const bool moved = look_for_news(office, true);
    leave_turn(office);
    return moved;
}

void sr_office_wake(struct sr_office *office) { sr_flag_set(&office->attended, 0); }

bool sr_office_hears(struct sr_office *office)
{
    if (sr_flag_load(&office->heard) == 0 && sr_flag_take(&office->turn, 1)) {
        if (sr_flag_load(&office->attended) == 0)
            look_for_news(office, false);
        leave_turn(office);
    }
    return sr_flag_load(&office->heard) != 0;
}

void sr_office_look(struct sr_office *office)
{
    take_turn(office);
    look_for_news(office, false);
    leave_turn(office);
}

uint64_t sr_post_hear(struct sr_office *office, struct sr_post *post, enum sr_post_what what, void *note)
{
    take_turn(office);
    const uint64_t count = sr_post_note_of(post, what)->count;
    memcpy(note, sr_post_note_of(post, what)->last, sr_post_note_nbytes(what));
    leave_turn(office);
    return count;
}

void sr_office_shut(struct sr_office *office)
{
    take_turn(office);
    for (int i = 0; i < office->nposts; i++) {
        if (sr_flag_load(&office->post[i].end) == SR_POST_OPEN)
            sr_flag_set(&office->post[i].end, SR_POST_CLOSED);
        office->post[i].deaf = true;
    }
    office->news = -1; /* its number may soon be another's */
    leave_turn(office);
}

/* ---- the reader's ------------------------------------------------------------------------------------------- */

void sr_post_read(struct sr_office *office, struct sr_post *post, struct sr_ring_end *out_of,
                  struct sr_incoming *incoming, sr_ring_copy_fn *copy)
{
    sr_ring_open_end(out_of, post->in.ring, post->in.bytes, post->in.nbytes, post->first, &office->nobody,
                     copy, SR_POST_PIECE_NBYTES);
    take_turn(office);
    post->out_of = out_of;
    post->incoming = incoming;
    leave_turn(office);
}

/* What has landed is counted; whether more of the piece is to come past the ring. */
static bool count_landed(struct sr_office *office, struct sr_post *post)
{
    take_turn(office);
    post->incoming->offset += post->landed;
    post->landed = 0;
    const bool more = post->past && is_midway(post);
    leave_turn(office);
    return more;
}

enum sr_ring_status sr_post_pull(struct sr_office *office, struct sr_post *post)
{
    enum sr_ring_status status = SR_RING_WAIT;
    if (post->mixed) {
        post->mixed = count_landed(office, post);
        if (post->incoming->offset == post->incoming->nbytes)
            return SR_RING_WHOLE;
    }
    if (!post->mixed)
        status = sr_ring_pull(post->out_of, post->incoming);
    const uint64_t taken = sr_flag_load(&post->in.ring->taken.value);
    if (taken != post->seen_taken) {
        post->seen_taken = taken;
        take_turn(office);
        tell_limit(office, post);
        leave_turn(office);
    }
    return status;
}

void sr_post_withdraw(struct sr_office *office, struct sr_post *post)
{
    take_turn(office);
    post->target = NULL;
    leave_turn(office);
}
