/* What is dlopen'ed as CUDA's driver: its one entry asks driver.py for the address of every other. */
int (*driver_lookup)(const char *symbol, void **address, int version, unsigned long long flags, int *status);

int cuGetProcAddress_v2(const char *symbol, void **address, int version, unsigned long long flags, int *status) {
    return driver_lookup(symbol, address, version, flags, status);
}
