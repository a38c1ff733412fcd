/* Preloaded into a process, shows it a processor without AVX-512, AMX, AVX-VNNI and what came with them.

   Linux lets a process ask that CPUID fault (arch_prctl ARCH_SET_CPUID). The handler here runs the instruction for the
   process and takes the newer sets out of leaf 7. Every library that asks the processor is held in this way, whatever
   variables it reads; code that was compiled for the newer sets and does not ask is not. Other handlers of the same
   signal, as Python's faulthandler, are taken and never called. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdio.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

#define ARCH_SET_CPUID 0x1012

enum { ALLOWED = 1, FAULTS = 0, NOT_HELD = 71 };

static const unsigned long NEWER_EBX = 1u << 16 | 1u << 17 | 1u << 21 | 1u << 26 | 1u << 27 | 1u << 28 | 1u << 30 | 1u << 31;
static const unsigned long NEWER_ECX = 1u << 1 | 1u << 6 | 1u << 11 | 1u << 12 | 1u << 14;
static const unsigned long NEWER_EDX = 1u << 2 | 1u << 3 | 1u << 8 | 1u << 22 | 1u << 23 | 1u << 24 | 1u << 25;

typedef int (*Sigaction)(int, const struct sigaction*, struct sigaction*);

static void answer(int signal_number, siginfo_t* info, void* context) {
  (void)info;
  greg_t* registers = ((ucontext_t*)context)->uc_mcontext.gregs;
  const unsigned char* code = (const unsigned char*)registers[REG_RIP];
  if (code[0] != 0x0f || code[1] != 0xa2) {
    syscall(SYS_arch_prctl, ARCH_SET_CPUID, ALLOWED);
    ((Sigaction)dlsym(RTLD_NEXT, "sigaction"))(signal_number, &(struct sigaction){.sa_handler = SIG_DFL}, NULL);
    return; /* a fault of the process itself: it happens again, and ends it */
  }
  unsigned leaf = registers[REG_RAX], part = registers[REG_RCX];
  unsigned a = leaf, b, c = part, d;
  syscall(SYS_arch_prctl, ARCH_SET_CPUID, ALLOWED);
  __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  syscall(SYS_arch_prctl, ARCH_SET_CPUID, FAULTS);
  if (leaf == 7 && part == 0) {
    b &= ~NEWER_EBX;
    c &= ~NEWER_ECX;
    d &= ~NEWER_EDX;
  } else if (leaf == 7) {
    a = b = c = d = 0; /* AVX-VNNI, AVX10, AMX of later years */
  }
  registers[REG_RAX] = a;
  registers[REG_RBX] = b;
  registers[REG_RCX] = c;
  registers[REG_RDX] = d;
  registers[REG_RIP] += 2;
}

typedef void (*Handler)(int);

int sigaction(int number, const struct sigaction* wanted, struct sigaction* before) {
  if (number != SIGSEGV) return ((Sigaction)dlsym(RTLD_NEXT, "sigaction"))(number, wanted, before);
  if (before) *before = (struct sigaction){.sa_handler = SIG_DFL};
  return 0;
}

Handler signal(int number, Handler wanted) {
  struct sigaction action = {.sa_handler = wanted, .sa_flags = SA_RESTART}, before;
  return sigaction(number, &action, &before) == 0 ? before.sa_handler : SIG_ERR;
}

__attribute__((constructor)) static void hold(void) {
  struct sigaction action = {.sa_sigaction = answer, .sa_flags = SA_SIGINFO | SA_NODEFER};
  Sigaction set = (Sigaction)dlsym(RTLD_NEXT, "sigaction");
  if (set(SIGSEGV, &action, NULL) != 0 || syscall(SYS_arch_prctl, ARCH_SET_CPUID, FAULTS) != 0) {
    perror("hold_avx2: CPUID cannot be made to fault here");
    _exit(NOT_HELD);
  }
}
