// Package registrytest is the suite that every registry passes.
//
// Whoever writes a registry calls [Run] from one test and gets the contract of package registry
// checked. What needs the store to break down is done through the hooks of a [Harness]; a case whose
// hook is nil is skipped and says what it needs.
package registrytest
