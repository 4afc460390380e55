// Package arch holds the tree to its architecture: which package may use which, what a program that
// embeds Warren links, and on which platforms it builds. It has tests only.
package arch
