// Package nebula is empty: its module names the version of nebula that make bench builds and compares with.
package nebula
