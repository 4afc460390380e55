package hostnet

// Intercept has f called before each change of the host, which is not made where f returns an error. It is
// for tests of drivers.
func (h *Host) Intercept(f func(what string) error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.before = f
}
