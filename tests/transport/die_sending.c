/* Loaded ahead of a process's libraries, it ends the process in the middle of the first large thing that it sends, in
   one message or in many. */
#define _GNU_SOURCE
#include <signal.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { LARGE = 1 << 20, PART = 1 << 16, MOST_PIECES = 64 };
static _Atomic size_t sent_so_far;

static int is_last(size_t size) { return (sent_so_far += size) > LARGE; }

static void die(void) {
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

ssize_t send(int to, const void* data, size_t size, int flags) {
  int last = is_last(size);
  long sent = syscall(SYS_sendto, to, data, last && size > PART ? PART : size, flags, NULL, 0);
  if (last && sent > 0) die();
  return sent;
}

static int cut(const struct iovec* pieces, int count, struct iovec* part) {
  size_t size = 0;
  for (int i = 0; i < count; ++i) size += pieces[i].iov_len;
  if (count > MOST_PIECES || !is_last(size)) return 0;
  for (int i = 0; i < count; ++i) {
    part[i] = pieces[i];
    if (part[i].iov_len > PART) part[i].iov_len = PART;
  }
  return 1;
}

ssize_t writev(int to, const struct iovec* pieces, int count) {
  struct iovec part[MOST_PIECES];
  if (!cut(pieces, count, part)) return syscall(SYS_writev, to, pieces, count);
  long sent = syscall(SYS_writev, to, part, count);
  if (sent > 0) die();
  return sent;
}

ssize_t sendmsg(int to, const struct msghdr* message, int flags) {
  struct iovec part[MOST_PIECES];
  struct msghdr cut_short = *message;
  if (!cut(message->msg_iov, (int)message->msg_iovlen, part)) return syscall(SYS_sendmsg, to, message, flags);
  cut_short.msg_iov = part;
  long sent = syscall(SYS_sendmsg, to, &cut_short, flags);
  if (sent > 0) die();
  return sent;
}
