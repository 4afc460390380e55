// Package examples has programs that use Warren, each in a folder of its own. Begin with quickstart.
//
// The package itself has only the example of the README, so that it is compiled and run.
package examples
