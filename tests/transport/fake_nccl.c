/* What transport/nccl_link.py needs of libnccl.so.2, over loopback: buffers lie in host memory, and a "stream" is a number
   whose transfers `fake_done` counts. `fake_fault` makes the next call of a kind go wrong. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

enum { SUCCESS, SYSTEM_ERROR = 2, REMOTE_ERROR = 6, IN_PROGRESS = 7 };
enum { NO_FAULT, INIT_FAILS, INIT_HANGS, TRANSFER_HANGS, TRANSFER_FAILS, SEND_REFUSED, TRANSFER_FLIPS };

typedef struct { char bytes[128]; } Id;
typedef struct { int port, listener; } Meeting;
typedef struct Transfer { struct Transfer* next; char* data; size_t size; int receives; long stream; } Transfer;
typedef struct {
  int rank, socket, listener, port, state, over, hangs;
  Transfer *first, *last;
  pthread_t worker;
  pthread_mutex_t lock;
  pthread_cond_t news;
} Comm;

static int fault, version = 23203;
static long pending[4096];
static pthread_mutex_t all = PTHREAD_MUTEX_INITIALIZER;

static int strikes(int kind) {
  pthread_mutex_lock(&all);
  int hit = fault == kind;
  if (hit) fault = NO_FAULT;
  pthread_mutex_unlock(&all);
  return hit;
}

void fake_fault(int kind) { fault = kind; }
void fake_version(int code) { version = code; }
int fake_done(long stream) {
  pthread_mutex_lock(&all);
  int done = pending[stream & 4095] == 0;
  pthread_mutex_unlock(&all);
  return done;
}

int ncclGetVersion(int* code) { *code = version; return SUCCESS; }
const char* ncclGetErrorString(int result) {
  return result == REMOTE_ERROR ? "remote process exited or there was a network error" : "unhandled system error";
}
const char* ncclGetLastError(void* comm) { (void)comm; return ""; }

static struct sockaddr_in loopback(int port) {
  struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port)};
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

int ncclGetUniqueId(Id* id) {
  struct sockaddr_in address = loopback(0);
  socklen_t size = sizeof address;
  Meeting meeting = {.listener = socket(AF_INET, SOCK_STREAM, 0)};
  if (bind(meeting.listener, (struct sockaddr*)&address, size) || listen(meeting.listener, 1)) return SYSTEM_ERROR;
  getsockname(meeting.listener, (struct sockaddr*)&address, &size);
  meeting.port = ntohs(address.sin_port);
  memset(id, 0, sizeof *id);
  memcpy(id, &meeting, sizeof meeting);
  return SUCCESS;
}

static void set_state(Comm* comm, int state) {
  pthread_mutex_lock(&comm->lock);
  comm->state = state;
  pthread_cond_broadcast(&comm->news);
  pthread_mutex_unlock(&comm->lock);
}

static int moved(Comm* comm, Transfer* one) {
  for (size_t at = 0; at < one->size;) {
    ssize_t n = one->receives ? recv(comm->socket, one->data + at, one->size - at, 0)
                              : send(comm->socket, one->data + at, one->size - at, MSG_NOSIGNAL);
    if (n <= 0) return 0;
    at += (size_t)n;
  }
  return 1;
}

static void* work(void* argument) {
  Comm* comm = argument;
  struct sockaddr_in address = loopback(comm->port);
  if (comm->rank == 1) {
    comm->socket = accept(comm->listener, NULL, NULL);
  } else if (connect(comm->socket, (struct sockaddr*)&address, sizeof address)) {
    comm->socket = -1;
  }
  set_state(comm, comm->socket < 0 ? REMOTE_ERROR : SUCCESS);
  for (;;) {
    pthread_mutex_lock(&comm->lock);
    while (!comm->first && !comm->over) pthread_cond_wait(&comm->news, &comm->lock);
    Transfer* one = comm->over ? NULL : comm->first;
    if (one && !(comm->first = one->next)) comm->last = NULL;
    int hangs = comm->hangs;
    pthread_mutex_unlock(&comm->lock);
    if (!one) return NULL;
    set_state(comm, SUCCESS); /* it is on the stream now */
    if (strikes(TRANSFER_HANGS) || hangs) { /* as a kernel whose peer never comes */
      comm->hangs = 1;
      free(one);
      continue;
    }
    if (!one->receives && strikes(TRANSFER_FLIPS)) one->data[one->size / 2] ^= 4;
    if (strikes(TRANSFER_FAILS) || !moved(comm, one)) {
      shutdown(comm->socket, SHUT_RDWR);
      set_state(comm, REMOTE_ERROR);
    } else {
      pthread_mutex_lock(&all);
      --pending[one->stream & 4095];
      pthread_mutex_unlock(&all);
    }
    free(one);
  }
}

int ncclCommInitRankConfig(Comm** made, int ranks, Id id, int rank, void* config) {
  Meeting meeting;
  (void)ranks, (void)config;
  memcpy(&meeting, &id, sizeof meeting);
  if (strikes(INIT_FAILS)) return SYSTEM_ERROR;
  Comm* comm = calloc(1, sizeof *comm);
  pthread_mutex_init(&comm->lock, NULL);
  pthread_cond_init(&comm->news, NULL);
  comm->rank = rank, comm->port = meeting.port, comm->listener = rank == 1 ? meeting.listener : -1;
  comm->socket = rank == 1 ? -1 : socket(AF_INET, SOCK_STREAM, 0);
  comm->state = IN_PROGRESS;
  *made = comm;
  if (strikes(INIT_HANGS)) comm->over = 1;
  else pthread_create(&comm->worker, NULL, work, comm);
  return IN_PROGRESS;
}

int ncclCommGetAsyncError(Comm* comm, int* state) {
  pthread_mutex_lock(&comm->lock);
  *state = comm->state;
  pthread_mutex_unlock(&comm->lock);
  return SUCCESS;
}

static int enqueue(Comm* comm, void* data, size_t size, int receives, long stream) {
  if (!receives && strikes(SEND_REFUSED)) return SYSTEM_ERROR;
  Transfer* one = calloc(1, sizeof *one);
  one->data = data, one->size = size, one->receives = receives, one->stream = stream;
  pthread_mutex_lock(&all);
  ++pending[stream & 4095];
  pthread_mutex_unlock(&all);
  pthread_mutex_lock(&comm->lock);
  if (comm->last) comm->last->next = one;
  else comm->first = one;
  comm->last = one;
  if (comm->state == SUCCESS) comm->state = IN_PROGRESS;
  pthread_cond_broadcast(&comm->news);
  pthread_mutex_unlock(&comm->lock);
  return IN_PROGRESS;
}

int ncclSend(const void* data, size_t size, int type, int peer, Comm* comm, void* stream) {
  (void)type, (void)peer;
  return enqueue(comm, (void*)data, size, 0, (long)(intptr_t)stream);
}

int ncclRecv(void* data, size_t size, int type, int peer, Comm* comm, void* stream) {
  (void)type, (void)peer;
  return enqueue(comm, data, size, 1, (long)(intptr_t)stream);
}

int ncclCommAbort(Comm* comm) {
  pthread_mutex_lock(&comm->lock);
  comm->over = 1;
  pthread_cond_broadcast(&comm->news);
  pthread_mutex_unlock(&comm->lock);
  if (comm->listener >= 0) shutdown(comm->listener, SHUT_RDWR);
  if (comm->socket >= 0) shutdown(comm->socket, SHUT_RDWR);
  if (comm->worker) pthread_join(comm->worker, NULL);
  if (comm->listener >= 0) close(comm->listener);
  if (comm->socket >= 0) close(comm->socket);
  free(comm);
  return SUCCESS;
}
