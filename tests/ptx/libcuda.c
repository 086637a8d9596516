/* What is loaded as CUDA's driver: its one entry asks driver.py for the address of every other. */
int (*driver_lookup)(const char *symbol, void **address, int version, unsigned long long flags, int *status);

int cuGetProcAddress_v2(const char *symbol, void **address, int version, unsigned long long flags, int *status) {
    return driver_lookup(symbol, address, version, flags, status);
}

/* Called while an exception is on its way when linking fails, where Python must not be entered. */
int cuLinkDestroy(void *link) {
    (void)link;
    return 0;
}
