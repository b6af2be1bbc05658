/* A slow disk: below $SLOW_FOLDER, each of these calls takes $SLOW_US microseconds more.
   For LD_PRELOAD; tests/end_to_end/test_slow_disk.py compiles it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <stdio.h>
static const char *root; static long us;
__attribute__((constructor)) static void init(void){ root=getenv("SLOW_FOLDER"); us=atol(getenv("SLOW_US")?:"20000"); }
static void pause_for(const char *p){ if(root&&p&&!strncmp(p,root,strlen(root))){ struct timespec t={us/1000000,(us%1000000)*1000}; nanosleep(&t,0);} }
static void pause_fd(int fd){ char l[64],b[512]; if(!root)return; snprintf(l,64,"/proc/self/fd/%d",fd); ssize_t n=readlink(l,b,511); if(n>0){b[n]=0;pause_for(b);} }
int open(const char*p,int f,...){ va_list a; va_start(a,f); int m=va_arg(a,int); va_end(a); static int(*r)(const char*,int,...); if(!r)r=dlsym(RTLD_NEXT,"open"); pause_for(p); return r(p,f,m);}
int open64(const char*p,int f,...){ va_list a; va_start(a,f); int m=va_arg(a,int); va_end(a); static int(*r)(const char*,int,...); if(!r)r=dlsym(RTLD_NEXT,"open64"); pause_for(p); return r(p,f,m);}
int stat(const char*p,struct stat*s){ static int(*r)(const char*,struct stat*); if(!r)r=dlsym(RTLD_NEXT,"stat"); pause_for(p); return r(p,s);}
int stat64(const char*p,struct stat64*s){ static int(*r)(const char*,struct stat64*); if(!r)r=dlsym(RTLD_NEXT,"stat64"); pause_for(p); return r(p,s);}
int lstat(const char*p,struct stat*s){ static int(*r)(const char*,struct stat*); if(!r)r=dlsym(RTLD_NEXT,"lstat"); pause_for(p); return r(p,s);}
int lstat64(const char*p,struct stat64*s){ static int(*r)(const char*,struct stat64*); if(!r)r=dlsym(RTLD_NEXT,"lstat64"); pause_for(p); return r(p,s);}
int rename(const char*p,const char*q){ static int(*r)(const char*,const char*); if(!r)r=dlsym(RTLD_NEXT,"rename"); pause_for(p); return r(p,q);}
int unlink(const char*p){ static int(*r)(const char*); if(!r)r=dlsym(RTLD_NEXT,"unlink"); pause_for(p); return r(p);}
ssize_t read(int fd,void*b,size_t n){ static ssize_t(*r)(int,void*,size_t); if(!r)r=dlsym(RTLD_NEXT,"read"); pause_fd(fd); return r(fd,b,n);}
ssize_t write(int fd,const void*b,size_t n){ static ssize_t(*r)(int,const void*,size_t); if(!r)r=dlsym(RTLD_NEXT,"write"); pause_fd(fd); return r(fd,b,n);}
int fstat(int fd,struct stat*s){ static int(*r)(int,struct stat*); if(!r)r=dlsym(RTLD_NEXT,"fstat"); pause_fd(fd); return r(fd,s);}
int fstat64(int fd,struct stat64*s){ static int(*r)(int,struct stat64*); if(!r)r=dlsym(RTLD_NEXT,"fstat64"); pause_fd(fd); return r(fd,s);}
