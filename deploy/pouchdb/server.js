'use strict';
// A server with CouchDB's API, in memory, for tests on a machine that has no
// CouchDB. The middleware in front corrects the mistakes of PouchDB Server that
// would let a test of revision conditions pass for the wrong reason:
//
//   * DELETE without a revision deletes; CouchDB answers 409 for a document
//     that is there and 404 for one that is not.
//   * If-Match is not read as a revision.
//   * a multipart body or a body that is not JSON ends the process.
//
// Usage: node server.js PORT ADMIN PASSWORD
const http = require('http');
const express = require('express');
const PouchDB = require('pouchdb-core')
  .plugin(require('pouchdb-adapter-memory'))
  .plugin(require('pouchdb-mapreduce'))
  .plugin(require('pouchdb-replication'))
  .defaults({ adapter: 'memory' });

const [port, admin, password] = process.argv.slice(2);
const app = express();
app.disable('x-powered-by');

// Writes need the admin's credentials, so that a test notices when credentials
// are lost on the way.
const expected = 'Basic ' + Buffer.from(`${admin}:${password}`).toString('base64');

app.get('/_up', (req, res) => res.json({ status: 'ok', seeds: {} }));

app.use((req, res, next) => {
  if (req.headers.authorization !== expected && req.method !== 'GET' && req.method !== 'HEAD') {
    return res.status(401).json({ error: 'unauthorized', reason: 'You are not authorized to access this db.' });
  }
  delete req.headers.authorization;
  next();
});

app.use((req, res, next) => {
  const segments = req.path.split('/').filter((s) => s !== '');
  const writes = req.method === 'PUT' || req.method === 'DELETE';
  const isDoc = segments.length >= 2 && !segments[0].startsWith('_') && (!segments[1].startsWith('_') || segments[1] === '_design');
  if (!writes || !isDoc) return next();
  const type = req.headers['content-type'] || '';
  if (type.startsWith('multipart/')) {
    return res.status(415).json({ error: 'bad_content_type', reason: 'multipart is not available on this test server' });
  }
  const match = req.headers['if-match'];
  if (match && req.query.rev === undefined) req.query.rev = match.replace(/^"|"$/g, '');
  if (req.method !== 'DELETE' || req.query.rev !== undefined) return next();
  const db = new PouchDB(decodeURIComponent(segments[0]));
  db.get(decodeURIComponent(segments.slice(1).join('/'))).then(
    () => res.status(409).json({ error: 'conflict', reason: 'Document update conflict.' }),
    (err) => res.status(404).json({ error: 'not_found', reason: err.reason || 'missing' }),
  );
});

app.use(
  require('express-pouchdb')(PouchDB, {
    mode: 'fullCouchDB',
    overrideMode: { exclude: ['routes/fauxton'] },
    inMemoryConfig: true,
    logPath: '/dev/null',
  }),
);

// Express tells an error handler by its four parameters.
app.use((err, req, res, next) => {
  res.status(400).json({ error: 'bad_request', reason: 'invalid UTF-8 JSON' });
});
process.on('uncaughtException', (err) => console.error('uncaught', err));
process.on('unhandledRejection', (err) => console.error('unhandled', err));

const server = http.createServer(app);
server.keepAliveTimeout = 60000;
server.listen(Number(port), '127.0.0.1', () => console.log('listening'));
process.on('SIGTERM', () => process.exit(0));
