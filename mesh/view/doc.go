// Package view is what a mesh shows of itself: its peers, what it withholds, and what is wrong, since
// when, for whom, and what to do about it. Package mesh has the same types under the same names.
package view
